"""Token batching: RServe's Algorithm 2 over schedulable tokens, and continuous batching of decode rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epd_scheduler.embeddings import Embedding
from epd_scheduler.encoding import place
from epd_scheduler.instance import Flight, Instance, RowFlight
from epd_scheduler.protocol import BatchPlan, EmbedSpan, Outcome, Row, Sample
from epd_scheduler.request import Span
from epd_scheduler.sequence import Rank, Sequence
from epd_scheduler.tracker import EVERYTHING

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
        core.counters.batches += 1
        core.counters.batch_tokens += sum(row.count for row in batch.flights)


class _Batch:
    """The batch S under construction, with what is left of the token budget B."""

    def __init__(self, core: Core, instance: Instance, now: float) -> None:
        self.core = core
        self.instance = instance
        self.now = now
        self.budget = core.config.scheduler.token_budget
        self.max_rows = core.config.scheduler.max_rows
        self.rows: list[Row] = []
        self.flights: list[RowFlight] = []

    @property
    def full(self) -> bool:
        """The budget is spent, or there are as many rows as may be."""
        return self.budget <= 0 or len(self.rows) >= self.max_rows

    def add_decodes(self) -> None:
        """One token for each decoding sequence, for the first in rank if there are more than rows.

        With pipeline stages the sequences are spread over micro-batches.
        """
        memory, stages = self.core.memory, self.instance.info.stages
        most = min(self.max_rows, self.budget)
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
            if memory.room_for(sequence, self.instance, 1, self.now):
                tokens = () if sequence.unsampled else (sequence.output[-1],)
                self._add(sequence, tokens, 1, sequence.next_position(), sample=True)

    def add_prefills(self) -> None:
        """Schedulable prompt tokens in rank order, across requests, until the budget is spent (Algorithm 2)."""
        overlap, memory = self.core.config.scheduler.overlap, self.core.memory
        if self.full or self._is_better_later():
            return
        first: Rank = ()  # of those that have no blocks yet and get none now: whom it outranks gets none either
        for sequence in self.core.order.for_prefill():
            starts = sequence.table is None
            if first and starts and sequence.rank > first:
                continue
            count = min(self._schedulable(sequence), self.budget)
            if not count:
                continue
            count = memory.room_for(sequence, self.instance, count, self.now)
            if count:
                self._add_chunk(sequence, count)
                if overlap == "intra" or self.full:
                    return
            elif starts:
                first = min(first or sequence.rank, sequence.rank)

    def _schedulable(self, sequence: Sequence) -> int:
        """How many of its tokens may be computed here now, as far as embeddings go."""
        ready, overlap = sequence.tracker.ready, self.core.config.scheduler.overlap
        if sequence.phase != "queued" or ready <= sequence.scheduled or (overlap == "none" and ready != EVERYTHING):
            return 0
        if sequence.reserves and not sequence.scheduled and sequence.tracker.needs_encoding():
            return 0  # once it has started it must not wait for memory
        place(self.core, sequence)
        return min(ready, sequence.known) - sequence.scheduled if sequence.prefill is self.instance else 0

    def _is_better_later(self) -> bool:
        """True if there are but pieces of prompts, less than B in all, and the instance encodes for such a prompt.

        With one stage it does one thing at a time: their forward, which reads all weights, would overlap nothing and
        only hold up the next encoding and the first token. The pieces wait for an outcome of this very instance, and
        each adds to them or makes a prompt whole; if memory is too scarce for another encoding, none is in flight.
        """
        if self.rows or self.instance.info.stages > 1 or not self.instance.encodes_for_itself:
            return False
        pieces = 0
        for sequence in self.core.order.for_prefill():
            if count := self._schedulable(sequence):
                pieces += count
                if sequence.tracker.ready == EVERYTHING or pieces >= self.budget:
                    return False
        return True

    def drop_preempted(self) -> bool:
        """Take out rows whose sequence lost its memory to a later row of the batch. True if there were any."""
        dropped = [flight for flight in self.flights if not flight.current]
        if not dropped:
            return False
        for flight in dropped:
            flight.release()
        self.rows = [row for row, flight in zip(self.rows, self.flights, strict=True) if flight.current]
        self.flights = [flight for flight in self.flights if flight.current]
        return True

    def _add_chunk(self, sequence: Sequence, count: int) -> None:
        """The next `count` known tokens of a queued sequence, which leaves the queue with the last of them."""
        start = sequence.scheduled
        whole = start + count == sequence.known
        spans = sequence.tracker.spans(start, count)
        embeds, reads = tuple([span for span, _ in spans]), tuple([embedding for _, embedding in spans])
        tokens, positions = sequence.tokens(start, count), sequence.positions(start, count)
        self._add(sequence, tokens, count, positions, sample=whole, embeds=embeds, reads=reads)
        self.core.order.served(sequence, count)
        if whole:
            _leave_queue(self.core, sequence, self.instance)

    def _add(
        self,
        sequence: Sequence,
        tokens: tuple[int, ...],
        count: int,
        positions: bytes,
        sample: bool,
        embeds: tuple[EmbedSpan, ...] = (),
        reads: tuple[Embedding, ...] = (),
    ) -> None:
        instance, start, table = self.instance, sequence.scheduled, sequence.table
        assert table is not None
        opened = sequence.sampler_state() if sample and sequence.sampler_at is not instance else None
        decode = sequence.phase == "decode"
        self.rows.append(Row(sequence.seq, start, tokens, positions, table.blocks, embeds, sample, opened))
        self.flights.append(
            RowFlight(sequence, sequence.epoch, table, start, count, sample, decode, reads, instance.embeddings)
        )
        table.pin()
        for embedding in reads:
            assert instance.embeddings is not None
            instance.embeddings.pin(embedding)
        self.budget -= count
        sequence.scheduled += count
        if sample:
            sequence.unsampled += 1
        if opened:
            _move_sampler(sequence, instance)
        if sequence.waiting_for:
            self.core.life.begin(sequence, self.now)


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
        sequence.computed = row.start + row.count
        if row.decode:
            core.counters.decoded_tokens += 1
            sequence.decode_since = sequence.decode_since or outcome.start
        else:
            _prefilled(core, instance, row, outcome)
        if row.sample:
            sequence.unsampled -= 1
            _take(core, sequence, samples[sequence.seq], now)


def _prefilled(core: Core, instance: Instance, row: RowFlight, outcome: Outcome) -> None:
    """A chunk's KV is there: its embeddings are needed no more."""
    sequence, prefilled = row.sequence, core.counters.prefilled
    prefilled[sequence.klass] = prefilled.get(sequence.klass, 0) + row.count
    detail = {"first": row.start, "tokens": row.count}
    sequence.timeline.append(Span("prefill", outcome.start, outcome.end, instance.name, detail))
    if row.pool:
        sequence.tracker.consume(sequence.computed, row.pool)


def _take(core: Core, sequence: Sequence, sample: Sample, now: float) -> None:
    """Report a sampled token, or the end that it means."""
    request, output = sequence.request, sequence.output
    if not output:
        sequence.timeline.append(Span("first token", now, now))
    if sample.token in request.sampling.stop_token_ids:
        core.life.end(sequence, now, "stop")
        return
    output.append(sample.token)
    core.life.events.append(sample)
    if len(output) == request.max_tokens:
        core.life.end(sequence, now, "length")
