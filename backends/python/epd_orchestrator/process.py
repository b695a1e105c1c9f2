"""Worker processes: children of the server, as this one is, which alone can say when they are gone."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from epd_backend import procfs


def older(names: Iterable[str]) -> dict[str, set[int]]:
    """Ids of the processes of the server's Python models `names` that began to run before this one."""
    found: dict[str, set[int]] = {name: set() for name in names}
    own = procfs.stat(os.getpid())
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            program, *arguments = os.fsdecode(path.read_bytes()).split("\0")
            pid = int(path.parent.name)
            stat = procfs.stat(pid)
            if program.endswith("triton_python_backend_stub") and stat.parent == own.parent and stat.begin < own.begin:
                # The path MODEL/VERSION/model.py, or another one if Triton fetched it; and the instance, MODEL_0_0.
                said = {Path(arguments[0]).parent.parent.name, *(each.rsplit("_", 2)[0] for each in arguments)}
                for model in found.keys() & said:
                    found[model].add(pid)
    return found


def require_alone(model: str, timeout_s: float = 10.0) -> None:
    """Wait until no older process of this one's own `model` runs. Raises RuntimeError after `timeout_s`.

    Triton may load a model while it still unloads it, or in order to put the new one in the old one's place.
    """
    deadline = time.monotonic() + timeout_s
    while pids := older([model])[model]:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"process {min(pids)} serves '{model}' already, and two at a time would use the same memory of workers "
                f"for different requests; its instance group must have count 1; to load it anew, unload '{model}' and "
                f"wait until its state in the repository index is UNAVAILABLE, or run `epd reload {model}`"
            )
        time.sleep(0.1)


def runs(pid: int) -> bool:
    """True while process `pid` is a child of the server that can still write to memory; a reused id is not."""
    try:
        stat = procfs.stat(pid)
    except OSError:
        return False
    return stat.alive and stat.parent == os.getppid()


def end(pid: int) -> None:
    """End another child of the server at once."""
    if pid != os.getpid() and runs(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
