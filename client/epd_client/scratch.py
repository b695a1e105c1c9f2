"""A temporary directory that does not outlive its owner for long, even if that is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class ScratchDirectory:
    """A temporary directory. Making one removes those of processes that were killed before they could.

    The owner holds a lock, which the kernel releases when it dies: process ids would not tell, where several containers
    share the place.
    """

    PREFIX = "epd-launch-"

    def __init__(self) -> None:
        for path in Path(tempfile.gettempdir()).glob(f"{self.PREFIX}*"):
            with contextlib.suppress(OSError):  # in use, gone meanwhile, or another user's
                os.close(_lock(path))
                shutil.rmtree(path, ignore_errors=True)
        made = Path(tempfile.mkdtemp(prefix=f".{self.PREFIX}"))  # under a name at which nobody looks until it is locked
        self._lock = _lock(made)
        self.path = made.rename(made.with_name(made.name[1:]))

    def remove(self) -> None:
        """Remove it with all that is in it; once only."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _lock(directory: Path) -> int:
    """A descriptor that holds the lock of a directory. Raises OSError if there is another."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd
