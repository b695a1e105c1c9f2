"""Encoder batching: RServe's Algorithm 1, spread over all encoder instances (EPD's intra-request parallelism)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epd_scheduler.instance import Flight, Instance
from epd_scheduler.protocol import EncodePlan, EncodeUnit, Outcome
from epd_scheduler.request import Span
from epd_scheduler.sequence import Sequence

if TYPE_CHECKING:
    from epd_scheduler.core import Core
    from epd_scheduler.embeddings import EmbeddingPool


def plan_encodes(core: Core, now: float) -> None:
    """Submit batches of at least C tokens, in order; the last batch of a request may be smaller."""
    full: set[Instance] = set()  # prefill instances whose memory is used up
    encoder = _free_encoder(core)
    if encoder is None:
        return
    for sequence in core.order.for_encoding():
        if sequence.prefill in full:
            continue  # it would wait behind who waits there already
        while sequence.phase == "queued" and sequence.tracker.needs_encoding():
            if _plan_one(core, encoder, sequence, now):
                encoder = _free_encoder(core)
                if encoder is None:
                    return
                continue
            if sequence.tracker.needs_encoding():
                if sequence.prefill is None:
                    return  # there is none
                full.add(sequence.prefill)
            break
        if full and len(full) >= len(core.doing("prefill")):
            return


def _free_encoder(core: Core) -> Instance | None:
    """The one with the fewest plans of those that take another."""
    free = (instance for instance in core.doing("encode") if instance.room_to_encode)
    return min(free, key=lambda instance: len(instance.flights), default=None)


def _plan_one(core: Core, encoder: Instance, sequence: Sequence, now: float) -> bool:
    """Gather and submit the sequence's next batch; False if it has none, or no memory for one."""
    gathered: list[EncodeUnit] = []
    embeddings = []
    tokens = 0
    for unit in sequence.tracker.unplanned():
        pool = place(core, sequence)
        if pool is None or sequence.prefill is None or not core.memory.reserve(sequence, sequence.prefill, now):
            break
        unit.embedding, cached = core.memory.embedding_for(sequence, pool, unit, now)
        if unit.embedding is None:
            break
        if cached:
            sequence.tracker.refresh()
            continue
        item, blocks = unit.item, unit.embedding.blocks
        gathered.append(EncodeUnit(sequence.seq, unit.item_index, unit.index, item.media, unit.rows, blocks))
        embeddings.append(unit.embedding)
        tokens += unit.rows
        if tokens >= core.config.scheduler.encode_tokens:
            break
    if not gathered:
        return False
    pool = sequence.lives_at
    assert pool is not None
    plan = EncodePlan(core.new_plan_id(), encoder.name, pool.arena, tuple(gathered))
    core.life.begin(sequence, now)
    core.submit(encoder, Flight(plan, now, embeddings=embeddings, pool=pool))
    return True


def place(core: Core, sequence: Sequence) -> EmbeddingPool | None:
    """The embedding pool of the sequence's prefill instance, chosen now if need be: the least loaded."""
    chosen = sequence.prefill
    if chosen is None or core.instances.get(chosen.name) is not chosen:
        chosen = sequence.prefill = min(core.doing("prefill"), key=lambda i: len(i.placed), default=None)
    if chosen is None:
        return None
    chosen.placed.add(sequence.seq)
    return chosen.embeddings


def complete_encode(core: Core, instance: Instance, flight: Flight, outcome: Outcome, now: float) -> None:
    """Mark landed embeddings ready; bad media fails the requests that hold it, a failed plan is planned again."""
    assert isinstance(flight.plan, EncodePlan)
    assert flight.pool is not None
    for index, (unit, embedding) in enumerate(zip(flight.plan.units, flight.embeddings, strict=True)):
        # Item numbers are the holder's own: the plan has those of the request that was the first to need the unit.
        holders = {s: s.tracker.item_of(embedding) for s in embedding.waiting if s.tracker.holds(embedding)}
        fault = outcome.unit_errors.get(index)
        if fault is None and outcome.error is None:
            flight.pool.landed(embedding)
            core.counters.encoded_tokens += unit.rows
            for sequence, item in holders.items():
                detail = {"item": item, "unit": unit.unit, "rows": unit.rows}
                sequence.timeline.append(Span("encode", outcome.start, outcome.end, instance.name, detail))
            continue
        flight.pool.failed(embedding)
        for sequence, item in holders.items():
            if sequence.phase == "ended":
                continue  # by another unit of this plan
            if fault is not None:
                core.life.end(sequence, now, "invalid_argument", f"image {item}: {fault}")
            else:
                core.failed_plan(sequence, f"{instance.name}: {outcome.error}", now)
    core.counters.encode_batches += 1
