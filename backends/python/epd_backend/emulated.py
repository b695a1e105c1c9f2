"""A worker that waits for a cost model's time instead of computing: orchestration at a size that is not here.

It answers the same exchanges as `epd_backend.worker.Worker`, holds no weights and no arenas, and says that it is
emulated in its WorkerInfo. Every sampled token is the same; embeddings and KV caches are never written.
"""

from __future__ import annotations

import os
import time
from bisect import insort
from collections import deque
from collections.abc import Sequence

from epd_scheduler.config import Config
from epd_scheduler.profile import Profile
from epd_scheduler.protocol import (
    ArenaInfo,
    BatchPlan,
    EncodePlan,
    MigratePlan,
    Outcome,
    Plan,
    Reply,
    Role,
    Sample,
    WorkerInfo,
    decode_exchange,
    encode,
)

from epd_backend.doorbell import Doorbell

_TOKEN = 65  # any ordinary token


class EmulatedWorker:
    """Plans run in order through the pipeline stages; a stage takes its share of a plan's time, one plan at a time.

    An encoding is all in the first stage.
    """

    def __init__(
        self, config: Config, profile: Profile, *, name: str, roles: Sequence[Role], device: str, stages: int = 1
    ) -> None:
        self._profile = profile
        self._stage_free = [0.0] * stages  # when each stage has done what was submitted
        self._pending: deque[Outcome] = deque()  # in order of their ends
        self._bell = Doorbell()
        kv, embedding = config.kv, config.embedding
        kv_shape = (kv.blocks, 1, 2, kv.block_size, 1, 1)
        embedding_shape = (embedding.blocks, embedding.block_size, 1)
        has_kv, has_embedding = "prefill" in roles or "decode" in roles, "prefill" in roles
        self.info = WorkerInfo(
            name=name,
            roles=tuple(roles),
            device=device,
            stages=stages,
            kv=(ArenaInfo(f"emulated-kv-{device}", "kv", device, "", kv_shape, "float32"),) if has_kv else (),
            embedding=ArenaInfo(f"emulated-embedding-{device}", "embedding", device, "", embedding_shape, "float32")
            if has_embedding
            else None,
            pid=os.getpid(),
            bell=self._bell.name,
            emulated=True,
        )

    def exchange(self, data: bytes | memoryview, media: memoryview) -> bytes:  # noqa: ARG002
        """As `Worker.exchange`: submit plans, wait for a first outcome, return those whose time has come."""
        message = decode_exchange(data)
        for plan in message.plans_for(self.info.pid):
            self._submit(plan)
        if self._pending and message.wait_s > 0:
            self._bell.wait(min(message.wait_s, max(0.0, self._pending[0].end - time.monotonic())))
        self._bell.clear()
        outcomes = []
        now = time.monotonic()
        while self._pending and self._pending[0].end <= now:
            outcomes.append(self._pending.popleft())
        return encode(Reply(tuple(outcomes), self.info if message.hello else None, len(self._pending)))

    def close(self) -> None:
        """Wake whoever waits."""
        self._bell.close()

    def _submit(self, plan: Plan) -> None:
        begin = end = max(time.monotonic(), self._stage_free[0])
        stages = 1 if isinstance(plan, EncodePlan) else len(self._stage_free)
        share = self._seconds(plan) / stages
        for stage in range(stages):
            end = self._stage_free[stage] = max(end, self._stage_free[stage]) + share
        samples: tuple[Sample, ...] = ()
        if isinstance(plan, BatchPlan):
            samples = tuple(Sample(row.seq, _TOKEN) for row in plan.rows if row.sample)
        insort(self._pending, Outcome(plan.id, begin, end, samples), key=lambda outcome: outcome.end)

    def _seconds(self, plan: Plan) -> float:
        if isinstance(plan, EncodePlan):
            return self._profile.encode.seconds(unit.rows for unit in plan.units)
        if isinstance(plan, MigratePlan):
            return self._profile.migrate.seconds(len(plan.blocks))
        return self._profile.forward.seconds((row.start, len(row.tokens) or 1) for row in plan.rows)
