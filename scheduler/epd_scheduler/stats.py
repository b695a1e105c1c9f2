"""Counters and gauges of the core, for metrics."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from epd_scheduler.request import Class

if TYPE_CHECKING:
    from epd_scheduler.core import Core

_MOST_WAITS = 10_000


@dataclass
class Stats:
    """Counters since the start; the gauges below them are filled in by `snapshot`."""

    encoded_tokens: int = 0
    prefilled: dict[Class, int] = field(default_factory=dict)  # tokens, by class
    decoded_tokens: int = 0
    encode_batches: int = 0
    batches: int = 0
    batch_tokens: int = 0
    migrations: int = 0
    preemptions: dict[str, int] = field(default_factory=dict)  # by class
    ends: dict[str, int] = field(default_factory=dict)  # by reason
    # Seconds from arrival to first plan, since the last snapshot; the last ones if nobody takes any.
    waits: deque[tuple[Class, float]] = field(default_factory=lambda: deque(maxlen=_MOST_WAITS))

    queued: int = 0  # waiting for encoding or prefill
    waiting: dict[Class, int] = field(default_factory=dict)  # the same, by class
    oldest: dict[Class, float] = field(default_factory=dict)  # arrival of the first of them, time.monotonic() seconds
    running: int = 0  # in hand-over or decode
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    embedding_blocks: int = 0
    embedding_blocks_used: int = 0
    in_flight: int = 0  # plans
    emulated: int = 0  # instances

    @property
    def prefilled_tokens(self) -> int:
        """Of all classes."""
        return sum(self.prefilled.values())

    def preempted(self, klass: str) -> None:
        """Count a preemption."""
        self.preemptions[klass] = self.preemptions.get(klass, 0) + 1

    def ended(self, reason: str) -> None:
        """Count an end."""
        self.ends[reason] = self.ends.get(reason, 0) + 1

    def snapshot(self, core: Core) -> Stats:
        """A copy with the gauges as they are now. It takes `waits` along: the next copy has those that end later."""
        waits, self.waits = self.waits, deque(maxlen=_MOST_WAITS)
        waiting: dict[Class, int] = {}
        oldest: dict[Class, float] = {}
        for sequence in core.sequences.values():
            if sequence.phase == "queued":
                klass, arrival = sequence.klass, sequence.request.arrival
                waiting[klass] = waiting.get(klass, 0) + 1
                oldest[klass] = min(oldest.get(klass, arrival), arrival)
        kv = {i.kv.id: i.kv for i in core.instances.values() if i.kv}.values()
        embeddings = {i.embeddings.arena.id: i.embeddings for i in core.instances.values() if i.embeddings}.values()
        return replace(
            self,
            ends=dict(self.ends),
            preemptions=dict(self.preemptions),
            prefilled=dict(self.prefilled),
            waits=waits,
            queued=len(core.order),
            waiting=waiting,
            oldest=oldest,
            running=len(core.sequences) - len(core.order),
            kv_blocks=sum(pool.size for pool in kv),
            kv_blocks_used=sum(pool.size - pool.free for pool in kv),
            embedding_blocks=sum(pool.size for pool in embeddings),
            embedding_blocks_used=sum(pool.used for pool in embeddings),
            emulated=sum(i.info.emulated for i in core.instances.values()),
            in_flight=sum(len(i.flights) for i in core.instances.values()),
        )
