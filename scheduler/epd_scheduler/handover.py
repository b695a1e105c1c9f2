"""Hand-over of prefilled sequences to decode instances (EPD's PD migration)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epd_scheduler.blocks import Table
from epd_scheduler.instance import Flight, Instance
from epd_scheduler.protocol import MigratePlan, Outcome
from epd_scheduler.request import Span
from epd_scheduler.sequence import Sequence

if TYPE_CHECKING:
    from epd_scheduler.core import Core


def plan_migrations(core: Core, now: float) -> None:
    """Give each prefilled sequence a decode instance; its KV is pulled there, unless it is there already."""
    waiting = [s for s in core.handover.values() if not s.unsampled and s.incoming is None]
    for sequence in sorted(waiting, key=lambda s: s.rank):
        if sequence.phase != "handover":
            continue  # preempted for one before it
        assert sequence.table
        able = [i for i in core.doing("decode") if i.room or i.kv is sequence.table.pool]
        target = min(able, key=lambda i: len(i.placed), default=None)
        if target is None:
            continue
        assert target.kv
        assert sequence.prefill
        if sequence.table.pool is target.kv:
            if core.memory.reserve_output(sequence, target, now):
                _arrive(core, sequence, target)
            else:
                # It starts again, with all blocks from the beginning, now that it can decode from this pool. None waits
                # here for blocks while it holds some, so however many there are, one that has all of them runs; and
                # each starts again once at most for each decode instance that joins.
                core.life.requeue(sequence, now, "queued")
        else:
            table = core.memory.table_for(sequence, target.kv, True, now)
            if table is not None:
                _submit(core, sequence, target, table, now)


def _submit(core: Core, sequence: Sequence, target: Instance, table: Table, now: float) -> None:
    source, origin = sequence.table, sequence.prefill
    assert source
    assert origin
    used = source.pool.blocks_for(sequence.computed)
    plan = MigratePlan(
        core.new_plan_id(),
        target.name,
        sequence.seq,
        origin.info.kv,
        source.blocks[:used],
        table.blocks[:used],
        target.close_now(),
    )
    sequence.incoming = table
    target.placed.add(sequence.seq)
    source.pin()
    table.pin()
    core.submit(target, Flight(plan, now, migration=(sequence, sequence.epoch, source, table)))


def complete_migration(core: Core, instance: Instance, flight: Flight, outcome: Outcome, now: float) -> None:
    """The KV is at the decode instance: the prefill instance's blocks are free."""
    assert flight.migration
    sequence, epoch, source, table = flight.migration
    source.unpin()
    table.unpin()
    if sequence.epoch != epoch:
        return
    if outcome.error is not None:
        core.failed_plan(sequence, f"{instance.name}: {outcome.error}", now)
        return
    sequence.timeline.append(Span("migrate", outcome.start, outcome.end, instance.name))
    source.release()
    sequence.table, sequence.incoming = table, None
    core.counters.migrations += 1
    _arrive(core, sequence, instance)


def _arrive(core: Core, sequence: Sequence, target: Instance) -> None:
    if sequence.prefill:
        sequence.prefill.placed.discard(sequence.seq)
    target.placed.add(sequence.seq)
    del core.handover[sequence.seq]
    sequence.phase = "decode"
    target.decoding[sequence.seq] = sequence
