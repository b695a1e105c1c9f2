"""Shared memory that ended servers left in /dev/shm.

Triton's Python backend makes one region a stub and does not remove that of a stub that crashed; the arenas of this
project vanish with their last user unless all of them are killed at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

DIRECTORY = Path("/dev/shm")
TRITON_PREFIX = "triton_python_backend_shm_region_"
ARENA_PREFIX = "epd_"


def names() -> frozenset[str]:
    """File names of the regions and arenas that exist now."""
    return frozenset(path.name for path in DIRECTORY.glob("*") if path.name.startswith((TRITON_PREFIX, ARENA_PREFIX)))


def remove_stale(candidates: Iterable[str]) -> list[str]:
    """Remove those of `candidates` that no living process uses; returns their names."""
    mapped = _mapped()
    removed = []
    for name in candidates:
        stale = _unlocked(name) if name.startswith(ARENA_PREFIX) else name not in mapped
        if stale:
            with contextlib.suppress(OSError):  # gone already, or another user's
                (DIRECTORY / name).unlink()
                removed.append(name)
    return removed


def _mapped() -> frozenset[str]:
    """Names of the files below /dev/shm that some process has mapped."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            found.update(
                line.split(f"{DIRECTORY}/", 1)[1].removesuffix(" (deleted)")
                for line in maps.read_text().splitlines()
                if f"{DIRECTORY}/" in line
            )
    return frozenset(found)


def _unlocked(name: str) -> bool:
    """Whether no process uses the arena: each user holds a shared lock for as long as it does."""
    try:
        fd = os.open(DIRECTORY / name, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
