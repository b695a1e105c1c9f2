"""When a plan starts and ends: instances as pipelines of stages that work first in, first out."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import msgspec

from epd_scheduler.profile import Profile
from epd_scheduler.protocol import BatchPlan, EncodePlan, Plan, WorkerInfo


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a plan costs beside its computation, and how much equal computations differ."""

    intake_s: float = 0.0  # from a request's arrival until the core has it: tokenising, reading image headers
    exchange_s: float = 0.0  # from the core to a worker, and again from the worker to the core
    response_s: float = 0.0  # from the core's token to the client: detokenising, the response
    hop_s: float = 0.0  # from a pipeline stage to the next
    embedding_bytes_s: float = math.inf  # from an encoder to a prefill instance on another device
    encode_spread: float = 0.0  # standard deviation of the logarithm of the time of equal encode plans
    forward_spread: float = 0.0  # the same of forwards
    seed: int = 0  # of both


class Busy(NamedTuple):
    """A piece of work on a plan."""

    instance: str
    stage: int  # pipeline stage
    what: str  # "encode", "forward", "send" (embeddings), "migrate" (KV)
    plan: int
    start: float
    end: float
    amount: int  # tokens; of "migrate", blocks


class Device:
    """The stages of a device; instances on one device share them, and their order of submission."""

    def __init__(self, stages: int) -> None:
        self.free = [0.0] * stages  # when each stage has done all that was submitted


class SimulatedInstance:
    """Computes when the plans of one instance start and end.

    As in `epd_backend.pipeline`, stage i of a plan starts when stage i-1 of it is done (and `hop_s` later) and stage i
    has done the plan before. A forward spends an equal share in each stage, and so does a migration, which pulls each
    stage's layers; an encoding, and the sending of its embeddings to another device, is all in the first.
    """

    def __init__(self, info: WorkerInfo, profile: Profile, timing: Timing, device: Device) -> None:
        self.info = info
        self._profile = profile
        self._timing = timing
        self._device = device
        self._random = random.Random(f"{timing.seed} {info.name}")

    def run(self, plan: Plan, now: float) -> list[Busy]:
        """What a plan that arrives at the instance `now` does, in order of time: its start and end are theirs."""
        if isinstance(plan, EncodePlan):
            tokens = sum(unit.rows for unit in plan.units)
            seconds = self._profile.encode.seconds(unit.rows for unit in plan.units)
            spans = [self._work(0, "encode", plan, tokens, now, self._vary(seconds, self._timing.encode_spread))]
            if plan.arena.device != self.info.device:
                seconds = tokens * self._profile.embedding_bytes_row / self._timing.embedding_bytes_s
                spans.append(self._work(0, "send", plan, tokens, spans[0].end, seconds))
            return spans
        if isinstance(plan, BatchPlan):
            rows = [(row.start, len(row.tokens) or 1) for row in plan.rows]
            what, amount = "forward", sum(count for _, count in rows)
            seconds = self._vary(self._profile.forward.seconds(rows), self._timing.forward_spread)
        else:
            what, amount = "migrate", len(plan.blocks)
            seconds = self._profile.migrate.seconds(amount)
        spans = []
        for stage in range(self.info.stages):
            spans.append(self._work(stage, what, plan, amount, now, seconds / self.info.stages))
            now = spans[-1].end + self._timing.hop_s
        return spans

    def _vary(self, seconds: float, spread: float) -> float:
        """A time, log-normal about the mean `seconds`."""
        return seconds * math.exp(self._random.gauss(-spread * spread / 2, spread)) if spread else seconds

    def _work(self, stage: int, what: str, plan: Plan, amount: int, now: float, seconds: float) -> Busy:
        start = max(now, self._device.free[stage])
        self._device.free[stage] = start + seconds
        return Busy(self.info.name, stage, what, plan.id, start, start + seconds, amount)
