"""Waits for a moment in which the machine has nothing else to do, so that what is timed has its cores to itself."""

from __future__ import annotations

import os
import time
from pathlib import Path

IDLE = 0.9  # share of all cores' time
WINDOW_S = 2.0  # for so long


def wait(limit_s: float) -> float:
    """Wait until the machine has been idle for a while, at most `limit_s`; the share of idle time last seen."""
    deadline = time.monotonic() + limit_s
    while True:
        before = _idle_s()
        time.sleep(WINDOW_S)
        idle = (_idle_s() - before) / (WINDOW_S * (os.cpu_count() or 1))
        if idle >= IDLE or time.monotonic() > deadline:
            return idle


def _idle_s() -> float:
    """Idle seconds of all cores together since boot; waiting for a disk counts as idle."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")
