"""Jobs flowing in order through stages, one thread a stage: chunked pipeline parallelism inside an instance.

While one job is in the second stage, the next is in the first. A stage is entered in the order of submission, and
every job comes out at its end, failed ones with their error.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from epd_scheduler.protocol import EncodePlan, Plan, Sample

from epd_backend.language import Forward

_log = logging.getLogger(__name__)


@dataclass
class Job:
    """One plan on its way."""

    plan: Plan
    media: tuple[memoryview, ...] = ()  # EncodePlan: encoded bytes of each unit
    start: float = 0.0
    forward: Forward | None = None  # BatchPlan: between stages
    samples: tuple[Sample, ...] = ()
    unit_errors: dict[int, str] | None = None
    copies: torch.cuda.Stream | None = None  # EncodePlan on a GPU: where its last work was launched
    error: str | None = None


class Pipeline:
    """Runs each job through `stages`, an encoding through the first alone, then `finish`, which must not raise.

    `finish` is called in the thread of the job's last stage. A job whose stage raised skips the remaining stages.
    `threads` is the intra-op parallelism of each stage.
    """

    def __init__(
        self, name: str, stages: Sequence[Callable[[Job], None]], finish: Callable[[Job], None], threads: int
    ) -> None:
        self._finish = finish
        self._intra_op = threads
        self._stages = stages
        self._queues: list[queue.SimpleQueue[Job | None]] = [queue.SimpleQueue() for _ in stages]
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name=f"{name}-stage-{index}", daemon=True)
            for index in range(len(stages))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._queues[0].put(job)

    def close(self) -> None:
        """Finish what was submitted, then stop the threads."""
        self._queues[0].put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, index: int) -> None:
        torch.set_num_threads(self._intra_op)  # counts for the calling thread, and so does inference_mode
        last = index + 1 == len(self._stages)
        with torch.inference_mode():
            while (job := self._queues[index].get()) is not None:
                if index == 0:
                    job.start = time.monotonic()
                if job.error is None:
                    self._step(self._stages[index], job)
                if last or isinstance(job.plan, EncodePlan):  # the work of an encoding is all in the first stage
                    self._finish(job)
                else:
                    self._queues[index + 1].put(job)
        if not last:
            self._queues[index + 1].put(None)

    @staticmethod
    def _step(stage: Callable[[Job], None], job: Job) -> None:
        try:
            stage(job)
        except Exception as error:  # a plan's failure is its outcome, never the worker's end
            _log.exception("plan %d failed", job.plan.id)
            job.error = f"{type(error).__name__}: {error}"
