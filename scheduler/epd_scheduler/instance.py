"""The core's state of one worker instance and of the plans in flight on it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from epd_scheduler.blocks import BlockPool, Table
from epd_scheduler.embeddings import Embedding, EmbeddingPool
from epd_scheduler.protocol import EncodePlan, Plan, Role, WorkerInfo
from epd_scheduler.sequence import Sequence


class RowFlight(msgspec.Struct, frozen=True):
    """What the core must know when a row's outcome comes in."""

    sequence: Sequence
    epoch: int
    table: Table
    start: int
    count: int
    sample: bool
    decode: bool  # a generated token's, not a part of the prompt or of a recomputation
    reads: tuple[Embedding, ...]
    pool: EmbeddingPool | None  # of `reads`

    @property
    def current(self) -> bool:
        """The sequence still lives the life that the row belongs to: neither ended nor preempted since."""
        return self.sequence.epoch == self.epoch

    def release(self) -> None:
        """The row runs no more: its blocks and embeddings may be reused once nobody else holds them."""
        self.table.unpin()
        for embedding in self.reads:
            assert self.pool is not None
            self.pool.unpin(embedding)


@dataclass
class Flight:
    """A plan without an outcome yet."""

    plan: Plan
    submitted: float
    rows: list[RowFlight] = field(default_factory=list)  # BatchPlan
    embeddings: list[Embedding] = field(default_factory=list)  # EncodePlan, one a unit
    pool: EmbeddingPool | None = None  # EncodePlan
    migration: tuple[Sequence, int, Table, Table] | None = None  # MigratePlan: sequence, epoch, source, destination


class Instance:
    """A live worker instance."""

    def __init__(self, info: WorkerInfo, kv: BlockPool | None, embeddings: EmbeddingPool | None, window: int) -> None:
        self.info = info
        self.window = window  # most plans in flight
        self.kv = kv
        self.embeddings = embeddings
        self.flights: dict[int, Flight] = {}
        self.decoding: dict[int, Sequence] = {}  # by seq, in order of arrival at the instance
        self.placed: set[int] = set()  # sequences that were given to the instance for prefill or decode
        self.closing: list[int] = []  # sampler states to drop with the next plan
        self.batch_next = False  # with a window of one plan, encoding and batches take turns

    @property
    def name(self) -> str:
        """The Triton model's name."""
        return self.info.name

    def does(self, role: Role) -> bool:
        """True if the instance works for that stage."""
        return role in self.info.roles

    @property
    def room(self) -> bool:
        """Another plan may be submitted."""
        return len(self.flights) < self.window

    @property
    def room_to_encode(self) -> bool:
        """Room for an encode plan: where batches run too, one at a time, so that a batch can always come after it."""
        if not self.room:
            return False
        return not self.kv or not any(isinstance(flight.plan, EncodePlan) for flight in self.flights.values())

    @property
    def encodes_for_itself(self) -> bool:
        """An encode plan in flight here is for prompts that are prefilled here."""
        return any(flight.pool is not None and flight.pool is self.embeddings for flight in self.flights.values())

    def close_now(self) -> tuple[int, ...]:
        """Sampler states that the next plan drops."""
        closing = tuple(self.closing)
        self.closing.clear()
        return closing
