"""Tells when a plan's work is done on its device, without holding up the thread that launches the next plan's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch

from epd_backend.pipeline import Job


class Completion:
    """Posts jobs in the order of submission, each when the devices have done what was launched before `submit`.

    On the CPU work is done when it returns, so jobs are posted at once, in the caller's thread; on GPUs a thread
    waits for an event of each.
    """

    def __init__(self, devices: Sequence[torch.device], post: Callable[[Job], None]) -> None:
        self._gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        self._post = post
        self._launched: queue.SimpleQueue[tuple[Job, list[torch.cuda.Event]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if self._gpus:
            self._thread = threading.Thread(target=self._wait, name="completion", daemon=True)
            self._thread.start()

    def submit(self, job: Job) -> None:
        """Post the job when the current stream of every device, and the job's own, have come this far."""
        if self._thread is None:
            self._post(job)
            return
        streams = [torch.cuda.current_stream(device) for device in self._gpus]
        events = []
        for stream in (*streams, job.copies) if job.copies else streams:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(stream)
            events.append(event)
        self._launched.put((job, events))

    def close(self) -> None:
        """Post what was submitted, then stop."""
        if self._thread is not None:
            self._launched.put(None)
            self._thread.join()

    def _wait(self) -> None:
        while (entry := self._launched.get()) is not None:
            job, events = entry
            try:
                for event in events:
                    event.synchronize()
            except RuntimeError as error:  # an asynchronous failure of a kernel; the device reports it here
                job.error = job.error or f"{type(error).__name__}: {error}"
            self._post(job)
