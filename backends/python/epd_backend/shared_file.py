"""Files in /dev/shm that several processes share and that vanish with their last user.

Liveness is `flock`: every user holds a shared lock for as long as it uses the file, and the kernel drops the lock of
a killed process. A file that nobody locks is therefore stale, whoever made it; the next user starts it anew.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

DIRECTORY = Path("/dev/shm")
PREFIX = "epd_"
HEADER_BYTES = 4096  # one page, so that what follows is page-aligned


class SharedFile:
    """A locked, open file: a header of at most 4,092 bytes, written once by its maker, then whatever follows.

    Use `join` to use the file and make it where it is missing, `open_existing` to use somebody else's.
    """

    def __init__(self, name: str, fd: int, header: bytes) -> None:
        self.name = name
        self.fd = fd
        self.header = header

    @classmethod
    def join(cls, name: str, make: Callable[[int], bytes]) -> SharedFile:
        """Open the file that others use, or make it: `make(fd)` fills an empty file and returns its header."""
        while True:
            fd = os.open(DIRECTORY / name, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if _try_exclusive(fd) and _is_current(name, fd):
                    _initialise(name, fd, make)
                # Going from the exclusive to the shared lock is not atomic: whatever happened in between, only a
                # file that is still the named one and has a header is taken.
                shared = cls._take(name, fd)
            except BaseException:
                os.close(fd)
                raise
            if shared is not None:
                return shared
            os.close(fd)

    @classmethod
    def open_existing(cls, name: str) -> SharedFile:
        """Raises FileNotFoundError when there is no such file in use."""
        while True:
            fd = os.open(DIRECTORY / name, os.O_RDWR)
            try:
                if _try_exclusive(fd):
                    raise FileNotFoundError(f"{DIRECTORY / name} is left over from a process that died")
                shared = cls._take(name, fd)
            except BaseException:
                os.close(fd)
                raise
            if shared is not None:
                return shared
            os.close(fd)

    @classmethod
    def _take(cls, name: str, fd: int) -> SharedFile | None:
        fcntl.flock(fd, fcntl.LOCK_SH)  # waits for a maker at most
        header = _read_header(fd)
        return cls(name, fd, header) if header and _is_current(name, fd) else None

    def close(self) -> bool:
        """Stop using the file; the last user removes it. Returns whether this was the last; once only."""
        if self.fd < 0:
            return False
        fd, self.fd = self.fd, -1
        try:
            return _remove_if_unused(self.name, fd)
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a mapping of the file may keep it open, and so locked, for longer
            os.close(fd)


def remove_stale(namespace: str | None = None) -> list[str]:
    """Remove the files that no process uses, of one server or of all, and return their names."""
    pattern = f"{PREFIX}*" if namespace is None else f"{PREFIX}{namespace}_*"
    removed = []
    for path in DIRECTORY.glob(pattern):
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError:  # gone meanwhile, or another user's
            continue
        try:
            if _remove_if_unused(path.name, fd):
                removed.append(path.name)
        finally:
            os.close(fd)
    return removed


def _try_exclusive(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_current(name: str, fd: int) -> bool:
    """Whether `name` still means the open file: its last user may have removed it before we had the lock."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(DIRECTORY / name))
    except FileNotFoundError:
        return False


def _initialise(name: str, fd: int, make: Callable[[int], bytes]) -> None:
    os.ftruncate(fd, 0)
    try:
        header = make(fd)
        if len(header) > HEADER_BYTES - 4:
            raise ValueError(f"the header of {name} has {len(header)} bytes, more than {HEADER_BYTES - 4}")
        os.pwrite(fd, header, 4)
        os.pwrite(fd, len(header).to_bytes(4, "little"), 0)  # last: a file without a length is unfinished
    except BaseException:
        os.unlink(DIRECTORY / name)
        raise


def _read_header(fd: int) -> bytes:
    size = int.from_bytes(os.pread(fd, 4, 0), "little")
    return os.pread(fd, size, 4)


def _remove_if_unused(name: str, fd: int) -> bool:
    if not (_try_exclusive(fd) and _is_current(name, fd)):
        return False
    os.unlink(DIRECTORY / name)
    return True
