"""When a plan starts and ends: instances as pipelines of stages that work first in, first out."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from epd_scheduler.profile import Profile
from epd_scheduler.protocol import BatchPlan, EncodePlan, Plan, WorkerInfo


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a plan costs beside its computation."""

    intake_s: float = 0.0  # from a request's arrival until the core has it: tokenising, reading image headers
    exchange_s: float = 0.0  # from the core to a worker, and again from the worker to the core
    hop_s: float = 0.0  # from a pipeline stage to the next
    embedding_bytes_s: float = math.inf  # from an encoder to a prefill instance on another device


COPIER = -1


class Busy(NamedTuple):
    """A piece of work on a plan."""

    instance: str
    stage: int  # pipeline stage, or COPIER
    what: str  # "encode", "forward", "send" (embeddings), "migrate" (KV)
    plan: int
    start: float
    end: float
    amount: int  # tokens; of "migrate", blocks


class Device:
    """The stages of a device and their copy engine; instances on one device share it, and its order of submission."""

    def __init__(self, stages: int) -> None:
        self.free = [0.0] * stages  # when each stage has done all that was submitted
        self.copier = 0.0


class SimulatedInstance:
    """Computes when the plans of one instance start and end.

    Stage i of a plan starts when stage i-1 of it is done (and `hop_s` later) and stage i has done the plan before. A
    forward spends an equal share in each stage; an encoding is all in the first. Copies, of KV in or of embeddings
    out, wait for their turn in the first stage, then run beside the computation, one after the other.
    """

    def __init__(self, info: WorkerInfo, profile: Profile, timing: Timing, device: Device) -> None:
        self.info = info
        self._profile = profile
        self._timing = timing
        self._device = device

    def run(self, plan: Plan, now: float) -> list[Busy]:
        """What a plan that arrives at the instance `now` does, in order of time: its start and end are theirs."""
        if isinstance(plan, BatchPlan):
            rows = [(row.start, len(row.tokens) or 1) for row in plan.rows]
            each = self._profile.forward.seconds(rows) / self.info.stages
            tokens = sum(count for _, count in rows)
            return self._compute(plan, "forward", tokens, now, each, self.info.stages)
        if isinstance(plan, EncodePlan):
            tokens = sum(unit.rows for unit in plan.units)
            spans = self._compute(
                plan, "encode", tokens, now, self._profile.encode.seconds(u.rows for u in plan.units), 1
            )
            if plan.arena.device != self.info.device:
                took = tokens * self._profile.embedding_bytes_row / self._timing.embedding_bytes_s
                spans.append(self._copy(plan, "send", tokens, spans[-1].end, took))
            return spans
        blocks = len(plan.blocks)
        turn = max(now, self._device.free[0])
        return [self._copy(plan, "migrate", blocks, turn, self._profile.migrate.seconds(blocks))]

    def _compute(self, plan: Plan, what: str, tokens: int, now: float, seconds: float, stages: int) -> list[Busy]:
        spans = []
        free = self._device.free
        for stage in range(stages):
            start = max(now, free[stage])
            free[stage] = start + seconds
            spans.append(Busy(self.info.name, stage, what, plan.id, start, free[stage], tokens))
            now = free[stage] + self._timing.hop_s
        return spans

    def _copy(self, plan: Plan, what: str, count: int, now: float, seconds: float) -> Busy:
        start = max(now, self._device.copier)
        self._device.copier = start + seconds
        return Busy(self.info.name, COPIER, what, plan.id, start, start + seconds, count)
