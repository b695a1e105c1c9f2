"""Worker processes: children of the server, as this one is, which alone can say when they are gone."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def runs(pid: int) -> bool:
    """True while process `pid` is a child of the server that can still write to memory; a reused id is not."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return False
    return state not in "ZX" and int(parent) == os.getppid()


def end(pid: int) -> None:
    """End another child of the server at once."""
    if pid != os.getpid() and runs(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
