"""Token batching: RServe's Algorithm 2 over schedulable tokens, and continuous batching of decode rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epd_scheduler.encoding import place
from epd_scheduler.instance import Flight, Instance, RowFlight
from epd_scheduler.protocol import BatchPlan, Outcome, Row, Sample
from epd_scheduler.request import Span, TokenEvent
from epd_scheduler.sequence import Sequence

if TYPE_CHECKING:
    from epd_scheduler.core import Core


def plan_batches(core: Core, instance: Instance, now: float) -> None:
    """Submit batches to a language instance until its window is full or nothing is schedulable."""
    while instance.kv and instance.room:
        batch = _Batch(core, instance, now)
        batch.add_decodes()
        if instance.does("prefill"):
            batch.add_prefills()
        dropped = batch.drop_preempted()
        if not batch.rows:
            if dropped:
                continue  # what they gave up may serve others
            return
        plan = BatchPlan(core.new_plan_id(), instance.name, tuple(batch.rows), instance.close_now())
        core.submit(instance, Flight(plan, now, rows=batch.flights))


class _Batch:
    """The batch S under construction, with what is left of the token budget B."""

    def __init__(self, core: Core, instance: Instance, now: float) -> None:
        self.core = core
        self.instance = instance
        self.now = now
        self.budget = core.config.scheduler.token_budget
        self.rows: list[Row] = []
        self.flights: list[RowFlight] = []

    def add_decodes(self) -> None:
        """One token for each decoding sequence, for the first in rank if there are more than rows.

        With pipeline stages the sequences are spread over micro-batches.
        """
        stages = self.instance.info.stages
        most = min(self.core.config.scheduler.max_rows, self.budget)
        if stages > 1:
            most = min(most, -(-len(self.instance.decoding) // stages))
        ahead = 2 if stages == 1 else 1  # rows in flight a sequence: the next one may name the last sampled token
        free = [s for s in self.instance.decoding.values() if s.unsampled < ahead and s.wants_more]
        if len(free) > most:
            free.sort(key=lambda sequence: sequence.rank)
        for sequence in free:
            if len(self.rows) >= most:
                break
            if sequence.phase != "decode":
                continue  # preempted for one before it
            if self.core.memory.room_for(sequence, self.instance, 1, self.now):
                self._add(sequence, 1)

    def add_prefills(self) -> None:
        """Schedulable prompt tokens in rank order, across requests, until the budget is spent (Algorithm 2)."""
        overlap = self.core.config.scheduler.overlap
        full = False  # whoever has no blocks yet gets none now
        for sequence in self.core.order.for_prefill():
            if self.budget <= 0 or len(self.rows) >= self.core.config.scheduler.max_rows:
                return
            if sequence.phase != "queued" or (full and sequence.table is None):
                continue
            count = min(sequence.tracker.ready_prefix(sequence.known) - sequence.scheduled, self.budget)
            if count <= 0 or (overlap == "none" and not sequence.tracker.all_ready()):
                continue
            if sequence.reserves and not sequence.scheduled and sequence.tracker.needs_encoding():
                continue  # once it has started it must not wait for memory
            place(self.core, sequence)
            if sequence.prefill is not self.instance:
                continue
            starts = sequence.table is None
            count = self.core.memory.room_for(sequence, self.instance, count, self.now)
            if count:
                self._add(sequence, count)
                if overlap == "intra":
                    return
            elif starts:
                full = True

    def drop_preempted(self) -> bool:
        """Take out rows whose sequence lost its memory to a later row of the batch. True if there were any."""
        kept = [(row, flight) for row, flight in zip(self.rows, self.flights, strict=True) if flight.current]
        dropped = [flight for flight in self.flights if not flight.current]
        for flight in dropped:
            flight.release()
        self.rows, self.flights = [row for row, _ in kept], [flight for _, flight in kept]
        return bool(dropped)

    def _add(self, sequence: Sequence, count: int) -> None:
        start, known, table = sequence.scheduled, sequence.known, sequence.table
        assert table is not None
        sample = start + count == known + sequence.unsampled
        explicit = start + count <= known
        opened = sample and sequence.sampler_at is not self.instance
        spans = sequence.tracker.spans(start, count) if start < sequence.tracker.length else []
        self.rows.append(
            Row(
                sequence.seq,
                start,
                sequence.tokens(start, count) if explicit else (),
                sequence.positions(start, count),
                tuple(table.blocks),
                tuple([span for span, _ in spans]),
                sample,
                sequence.sampler_state() if opened else None,
            )
        )
        table.pin()
        reads = [embedding for _, embedding in spans]
        pool = self.instance.embeddings
        for embedding in reads:
            assert pool is not None
            pool.pin(embedding)
        self.flights.append(RowFlight(sequence, sequence.epoch, table, start, count, sample, reads, pool))
        self.budget -= count
        sequence.scheduled += count
        self.core.life.begin(sequence, self.now)
        if sequence.phase == "queued":
            self.core.order.served(sequence, count)
        if opened:
            _move_sampler(sequence, self.instance)
        if sample:
            sequence.unsampled += 1
            if sequence.phase == "queued":
                _leave_queue(self.core, sequence, self.instance)


def _move_sampler(sequence: Sequence, instance: Instance) -> None:
    if sequence.sampler_at:
        sequence.sampler_at.closing.append(sequence.seq)
    sequence.sampler_at = instance


def _leave_queue(core: Core, sequence: Sequence, instance: Instance) -> None:
    """The prompt is scheduled whole: decode here, or be handed over when the first token is in."""
    core.order.remove(sequence)
    if instance.does("decode"):
        sequence.phase = "decode"
        instance.decoding[sequence.seq] = sequence
    else:
        sequence.phase = "handover"
        core.handover[sequence.seq] = sequence


def complete_batch(core: Core, instance: Instance, flight: Flight, outcome: Outcome, now: float) -> None:
    """Advance the sequences of a batch and report their tokens."""
    samples = {sample.seq: sample for sample in outcome.samples}
    for row in flight.rows:
        row.release()
        sequence = row.sequence
        if not row.current:
            continue
        if outcome.error is not None:
            core.failed_plan(sequence, f"{instance.name}: {outcome.error}", now)
            continue
        _advance(core, instance, row, outcome)
        if row.sample:
            sequence.unsampled -= 1
            _take(core, sequence, samples[sequence.seq], now)


def _advance(core: Core, instance: Instance, row: RowFlight, outcome: Outcome) -> None:
    sequence = row.sequence
    sequence.computed = row.start + row.count
    if row.count == 1 and row.start >= len(sequence.request.tokens):
        core.counters.decoded_tokens += 1
        sequence.decode_since = sequence.decode_since or outcome.start
        return
    prefilled = core.counters.prefilled
    prefilled[sequence.klass] = prefilled.get(sequence.klass, 0) + row.count
    detail = {"first": row.start, "tokens": row.count}
    sequence.timeline.append(Span("prefill", outcome.start, outcome.end, instance.name, detail))
    if row.pool:
        sequence.tracker.consume(sequence.computed, row.pool)


def _take(core: Core, sequence: Sequence, sample: Sample, now: float) -> None:
    """Report a sampled token, or the end that it means."""
    if not sequence.output:
        sequence.timeline.append(Span("first token", now, now))
    if sample.token in sequence.request.sampling.stop_token_ids:
        core.life.end(sequence, now, "stop")
        return
    sequence.output.append(sample.token)
    core.life.token(TokenEvent(sequence.seq, sample.token, sample.logprob, sample.top))
    if len(sequence.output) == sequence.request.max_tokens:
        core.life.end(sequence, now, "length")
