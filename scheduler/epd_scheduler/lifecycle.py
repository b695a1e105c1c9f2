"""How sequences begin, end, are preempted, and how plans are forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epd_scheduler.instance import Flight
from epd_scheduler.request import EndEvent, EndReason, Event, Span
from epd_scheduler.sequence import Sequence

if TYPE_CHECKING:
    from epd_scheduler.core import Core


class Lifecycle:
    """Every sequence ends exactly once, and holds nothing afterwards but what plans in flight name."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.events: list[Event] = []  # since the last `drain`

    def drain(self) -> list[Event]:
        """Events since the last call, in order."""
        events, self.events = self.events, []
        return events

    def begin(self, sequence: Sequence, now: float) -> None:
        """A plan is made for a sequence: its waiting ends."""
        if not sequence.started:
            sequence.started = True
            self._core.counters.waits.append((sequence.klass, now - sequence.request.arrival))
        sequence.end_wait(now)

    def end(self, sequence: Sequence, now: float, reason: EndReason, message: str = "") -> None:
        """The only way out of the core."""
        sequence.end_wait(now)
        self._mark_phase_end(sequence, now)
        self._detach(sequence)
        sequence.phase = "ended"
        del self._core.sequences[sequence.seq]
        self._core.counters.ended(reason)
        self.events.append(EndEvent(sequence.seq, reason, message, tuple(sequence.timeline), sequence.klass))

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Take a sequence's memory for one that outranks it."""
        if sequence.scheduled == 0:
            self.requeue(sequence, now, "queued")  # it has not begun: it only loses its place in memory
            return
        self._core.counters.preempted(sequence.klass)
        self.requeue(sequence, now, "preempted")

    def requeue(self, sequence: Sequence, now: float, why: str) -> None:
        """Free all that a sequence holds and queue it again; its tokens so far stay and are recomputed."""
        self._mark_phase_end(sequence, now)
        self._detach(sequence)
        sequence.computed = sequence.scheduled = sequence.unsampled = 0
        sequence.end_wait(now)
        sequence.waiting_for, sequence.waiting_since = why, now
        sequence.phase = "queued"
        self._core.order.add(sequence)

    def fail_unserved(self, now: float) -> None:
        """End the sequences whose next stages have no instance left."""
        for sequence in list(self._core.sequences.values()):
            if reason := self._core.unserved(sequence):
                self.end(sequence, now, "unavailable", reason)

    def forget_flight(self, flight: Flight) -> None:
        """A plan had no outcome, and nothing of it can still run."""
        for row in flight.rows:
            row.release()
        for embedding in flight.embeddings:
            assert flight.pool is not None
            flight.pool.reclaim(embedding)
        if flight.migration:
            _, _, source, destination = flight.migration
            source.unpin()
            destination.unpin()

    def _detach(self, sequence: Sequence) -> None:
        """Take a sequence out of every queue and release what it holds; what is in flight for it counts no more."""
        core = self._core
        sequence.epoch += 1
        if sequence.phase == "queued":
            core.order.remove(sequence)
        core.handover.pop(sequence.seq, None)
        for instance in core.instances.values():
            instance.decoding.pop(sequence.seq, None)
            instance.placed.discard(sequence.seq)
        for table in (sequence.table, sequence.incoming):
            if table:
                table.release()
        sequence.table = sequence.incoming = None
        sequence.tracker.reset(sequence.lives_at)
        core.memory.released(sequence)
        if sequence.sampler_at:
            sequence.sampler_at.closing.append(sequence.seq)
            sequence.sampler_at = None

    @staticmethod
    def _mark_phase_end(sequence: Sequence, now: float) -> None:
        if sequence.phase == "decode" and sequence.decode_since:
            span = Span("decode", sequence.decode_since, now, detail={"tokens": len(sequence.output)})
            sequence.timeline.append(span)
        sequence.decode_since = 0.0
