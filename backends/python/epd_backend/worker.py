"""What runs inside one worker instance: takes plans, returns outcomes, keeps its device busy in threads of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from epd_scheduler.config import Config
from epd_scheduler.protocol import (
    EncodePlan,
    Outcome,
    Plan,
    Reply,
    Role,
    WorkerInfo,
    decode_exchange,
    encode,
)

from epd_backend import weights
from epd_backend.arena import ArenaMap, torch_device
from epd_backend.completion import Completion
from epd_backend.doorbell import Doorbell, ring
from epd_backend.executor import LanguageExecutor
from epd_backend.pipeline import Job, Pipeline
from epd_backend.shared_file import remove_stale

if TYPE_CHECKING:
    from epd_backend.encoder import EncodeExecutor


class Worker:
    """One instance: its weights, its arenas and its threads.

    `roles` may combine; an instance with "encode" holds the vision weights, one with "prefill" or "decode" the
    language weights. `device` is "cpu:N" (virtual: its own arenas) or "cuda:N"; with several pipeline `stages`, stage
    i runs on CUDA device N + i, or all on the one CPU device. `threads` is the CPU parallelism of each stage.
    `namespace` names the server: instances with the same one share the arenas of a device.

    Raises ArenaError, UnsupportedModelError, OSError (no such checkpoint), ValueError (stages).
    """

    def __init__(
        self,
        config: Config,
        *,
        name: str,
        roles: Sequence[Role],
        device: str,
        stages: int = 1,
        threads: int = 1,
        namespace: str,
    ) -> None:
        self.name = name
        self._roles = tuple(roles)
        self._lock = threading.Lock()
        self._outcomes: list[Outcome] = []
        self._in_progress = 0
        self._closed = False
        self._arenas = ArenaMap()
        self._encoder: EncodeExecutor | None = None
        self._language: LanguageExecutor | None = None
        remove_stale()
        devices = _stage_devices(device, stages)
        self._devices = [torch_device(each) for each in devices]
        held = 0
        try:
            if "encode" in roles:
                from epd_backend.encoder import EncodeExecutor  # image libraries that a language instance does without

                model = weights.load_part(config.model, "vision", getattr(torch, config.dtype), self._devices[0])
                self._encoder = EncodeExecutor(config, model, self._arenas)
                held += weights.weight_bytes(model)
            if "prefill" in roles or "decode" in roles:
                self._language = LanguageExecutor(
                    config, devices, namespace, self._arenas, embeddings="prefill" in roles
                )
                held += self._language.weight_bytes
        except BaseException:
            self._arenas.close()
            raise
        self._bell = Doorbell()
        self.info = WorkerInfo(
            name=name,
            roles=self._roles,
            device=device,
            stages=stages,
            kv=self._language.kv if self._language else (),
            embedding=self._language.embedding if self._language else None,
            weight_bytes=held,
            pid=os.getpid(),
            bell=self._bell.name,
        )
        self._completion = Completion(self._devices, self._post)
        self._pipeline = Pipeline(name, [partial(self._step, i) for i in range(stages)], self._finish, threads)

    def exchange(self, data: bytes | memoryview, media: memoryview) -> bytes:
        """Submit the plans of an encoded Exchange, return an encoded Reply with the outcomes finished so far.

        While plans are in progress it waits for a first outcome, or for a ring of its bell, `wait_s` at most. `media`
        is copied before it returns.
        Raises msgspec.ValidationError for what is not an Exchange, RuntimeError after `close`.
        """
        message = decode_exchange(data)
        spans = {key: media[at : at + size] for key, (at, size) in message.media.items() if at + size <= len(media)}
        for plan in message.plans_for(self.info.pid):
            self._submit(plan, spans)
        with self._lock:
            wait = self._in_progress and not self._outcomes
        if wait and message.wait_s > 0:
            self._bell.wait(message.wait_s)
        with self._lock:
            outcomes, self._outcomes = tuple(self._outcomes), []
            pending = self._in_progress
            self._bell.clear()  # not before the wait: it may have been rung while the call was on its way here
        return encode(Reply(outcomes, self.info if message.hello else None, pending))

    def close(self) -> None:
        """Finish the submitted plans, stop the threads, release the arenas. Does nothing the second time."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._pipeline.close()
        self._completion.close()
        self._bell.close()
        self._encoder = self._language = None
        self._arenas.close()

    def _submit(self, plan: Plan, media: dict[int, memoryview]) -> None:
        job = Job(plan)
        if isinstance(plan, EncodePlan):
            missing = [unit.media for unit in plan.units if unit.media not in media]
            if missing:
                job.error = f"plan {plan.id} names media {missing} that its exchange does not carry"
            else:
                job.media = tuple(memoryview(bytes(media[unit.media])) for unit in plan.units)
        with self._lock:  # nothing may follow what ends the pipeline
            if self._closed:
                raise RuntimeError(f"instance {self.name} is closed; load the model again")
            self._in_progress += 1
            self._pipeline.submit(job)

    def _step(self, index: int, job: Job) -> None:
        """One stage's part of a plan; the encoder's is all in the first."""
        if self._devices[index].type == "cuda":
            torch.cuda.set_device(self._devices[index])  # of this thread; kernels outside torch need it
        executor = self._encoder if isinstance(job.plan, EncodePlan) else self._language
        if executor is None:
            raise ValueError(f"instance {self.name} has roles {', '.join(self._roles)} only; send the plan elsewhere")
        if isinstance(executor, LanguageExecutor):
            executor.step(index, job)
        elif index == 0 and isinstance(job.plan, EncodePlan):
            job.copies = executor.copies
            job.unit_errors = executor.run(job.plan, list(job.media))

    def _finish(self, job: Job) -> None:
        if self._language is not None:
            self._language.settle(job)
        job.forward, job.media = None, ()
        self._completion.submit(job)

    def _post(self, job: Job) -> None:
        outcome = Outcome(
            plan=job.plan.id,
            start=job.start,
            end=time.monotonic(),
            samples=job.samples if job.error is None else (),
            unit_errors=job.unit_errors or {},
            error=job.error,
        )
        with self._lock:
            self._outcomes.append(outcome)
            self._in_progress -= 1
            ring(self._bell.name)  # under the lock: an outcome that is taken has rung, and rings no later exchange


def _stage_devices(device: str, stages: int) -> list[str]:
    if stages < 1:
        raise ValueError(f"stages is {stages}; an instance has at least one")
    if not device.startswith("cuda"):
        return [device] * stages
    kind, _, index = device.partition(":")
    return [f"{kind}:{int(index or 0) + stage}" for stage in range(stages)]
