"""The core's state of one request."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from epd_scheduler.blocks import Table
from epd_scheduler.embeddings import EmbeddingPool
from epd_scheduler.protocol import SamplerState
from epd_scheduler.request import Class, Request, Span
from epd_scheduler.tracker import EmbeddingTracker

if TYPE_CHECKING:
    from epd_scheduler.instance import Instance

_int32 = struct.Struct("i")

Rank = tuple[float, ...]
Phase = Literal["queued", "handover", "decode", "ended"]


class Sequence:
    """A request on its way through the stages.

    `known` tokens are the prompt and what was generated so far. The KV of the first `computed` is in the arena, that
    of the first `scheduled` is there or in plans in flight; `unsampled` of those plans' rows sample a token. What was
    planned in an older `epoch`, before a preemption or the end, counts no more.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.seq = request.seq
        self.klass: Class = "sand"
        self.deadline = request.arrival  # time.monotonic() seconds
        self.rank: Rank = ()  # given by the order policy
        self.reserves = False  # it starts only with all the memory that it can ever need, and is never preempted then
        self.tracker = EmbeddingTracker(request.items)
        self.output: list[int] = []
        self.phase: Phase = "queued"  # queued: encoding, prefilling, or waiting for either
        self.computed = 0
        self.scheduled = 0
        self.unsampled = 0
        self.epoch = 0
        self.failures = 0  # plans that failed under it
        self.table: Table | None = None
        self.incoming: Table | None = None  # destination of a migration in flight
        self.prefill: Instance | None = None  # where its embeddings and its prefill KV go
        self.sampler_at: Instance | None = None  # which instance holds its sampler state
        self.timeline: list[Span] = []
        self.started = False  # a plan was made for it
        self.waiting_for: str | None = "queued"  # name of the span that ends when the next plan is made for it
        self.waiting_since = request.arrival
        self.decode_since = 0.0

    @property
    def known(self) -> int:
        """Tokens whose value is known: prompt and output."""
        return len(self.request.tokens) + len(self.output)

    @property
    def most(self) -> int:
        """Tokens that it can ever have: prompt and all output."""
        return len(self.request.tokens) + self.request.max_tokens

    @property
    def lives_at(self) -> EmbeddingPool | None:
        """The pool of its embeddings, once a prefill instance is chosen."""
        return self.prefill.embeddings if self.prefill else None

    @property
    def wants_more(self) -> bool:
        """True while tokens remain to be sampled beyond those in flight."""
        return len(self.output) + self.unsampled < self.request.max_tokens

    @property
    def protected(self) -> bool:
        """True once it has started with all its memory reserved."""
        return self.reserves and self.scheduled > 0

    def end_wait(self, now: float) -> None:
        """Note how long the sequence has waited, if it was waiting."""
        if self.waiting_for:
            self.timeline.append(Span(self.waiting_for, self.waiting_since, now))
            self.waiting_for = None

    def tokens(self, first: int, count: int) -> tuple[int, ...]:
        """Known tokens `first ..< first + count`."""
        prompt = self.request.tokens
        if first + count <= len(prompt):
            return prompt[first : first + count]
        offset = max(first - len(prompt), 0)
        return prompt[first:] + tuple(self.output[offset : first + count - len(prompt)])

    def positions(self, first: int, count: int) -> bytes:
        """int32 [d, count], C order, of tokens `first ..< first + count`, prompt or generated."""
        prompt = self.request.positions
        dimensions, length = prompt.shape
        if first + count <= length:
            return prompt[:, first : first + count].tobytes()
        generated = np.arange(max(first, length), first + count, dtype=np.int32) + np.int32(self.request.position_delta)
        tail = np.broadcast_to(generated, (dimensions, len(generated)))
        both: npt.NDArray[np.int32] = np.concatenate([prompt[:, first:], tail], axis=1)
        return both.tobytes()

    def next_position(self) -> bytes:
        """`positions` of the first token that is not scheduled, which is a generated one."""
        position = self.scheduled + self.request.position_delta
        return _int32.pack(position) * len(self.request.positions)

    def sampler_state(self) -> SamplerState:
        """What an instance needs to sample the next token."""
        sampling = self.request.sampling
        prompt = self.request.tokens if sampling.repetition_penalty != 1.0 else ()
        return SamplerState(sampling, prompt, tuple(self.output))
