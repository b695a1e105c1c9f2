"""Arenas: one allocation a device and kind, made by the first instance on the device and mapped by the others.

Instances on one device share the arena, so that handing over embeddings or KV between them costs zero bytes.
On the CPU an arena is a file in /dev/shm; `cpu:0`, `cpu:1`, ... are virtual devices with arenas of their own.
On a GPU it is a CUDA allocation that a small file in /dev/shm describes (`arena_cuda`).
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import secrets
import threading
from typing import Literal, Protocol

import msgspec
import torch
from epd_scheduler.protocol import ArenaInfo

from epd_backend.shared_file import DIRECTORY, HEADER_BYTES, PREFIX, SharedFile


class ArenaError(RuntimeError):
    """An arena cannot be made or mapped; the message names the cause and the remedy."""


class Arena(Protocol):
    """A mapped arena."""

    info: ArenaInfo
    tensor: torch.Tensor  # of `info.shape` and `info.dtype`

    def close(self) -> None:
        """Unmap it; the last user frees it. Tensors that still refer to it stay valid until they go."""


def torch_device(name: str) -> torch.device:
    """The torch device of a device name: all virtual CPU devices are torch's only one."""
    return torch.device("cpu") if name.startswith("cpu") else torch.device(name)


def join(
    namespace: str,
    device: str,
    kind: Literal["kv", "embedding"],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    first_layer: int = 0,
) -> Arena:
    """Map the device's arena, or make it. `namespace` names the server: only its instances share.

    Raises ArenaError when there is no room, or when the device's arena has another shape or dtype.
    """
    layers = f"-{first_layer}-{shape[1]}" if kind == "kv" else ""
    wanted = ArenaInfo(
        id=secrets.token_hex(8),
        kind=kind,
        device=device,
        handle=f"{PREFIX}{namespace}_{device.replace(':', '-')}_{kind}{layers}",
        shape=shape,
        dtype=str(dtype).removeprefix("torch."),
        first_layer=first_layer,
    )
    arena = _join(wanted)
    if msgspec.structs.replace(arena.info, id=wanted.id) != wanted:
        found = arena.info
        arena.close()
        raise ArenaError(
            f"the {kind} arena of {device} has shape {found.shape} and dtype {found.dtype}, this instance needs "
            f"{shape} and {wanted.dtype}; give all instances of a server one model and one configuration"
        )
    return arena


def attach(info: ArenaInfo) -> Arena:
    """Map an arena that another instance made. Raises ArenaError when it is gone."""
    if info.device.startswith("cuda"):
        from epd_backend.arena_cuda import CudaArena

        return CudaArena.attach(info)
    return CpuArena.attach(info)


def _join(wanted: ArenaInfo) -> Arena:
    if wanted.device.startswith("cuda"):
        from epd_backend.arena_cuda import CudaArena

        return CudaArena.join(wanted)
    return CpuArena.join(wanted)


class ArenaMap:
    """The arenas that one instance uses, its own and others', each mapped once. Safe to use from several threads."""

    def __init__(self) -> None:
        self._arenas: dict[str, Arena] = {}
        self._lock = threading.Lock()

    def add(self, arena: Arena) -> None:
        """Keep one's own arena, so that `open` finds it."""
        self._arenas[arena.info.id] = arena

    def open(self, info: ArenaInfo) -> torch.Tensor:
        """The arena as a tensor of `info.shape`. Raises ArenaError when it is gone."""
        with self._lock:
            if info.id not in self._arenas:
                self._arenas[info.id] = attach(info)
            return self._arenas[info.id].tensor

    def close(self) -> None:
        """Unmap all."""
        with self._lock:
            while self._arenas:
                self._arenas.popitem()[1].close()


class CpuArena:
    """An arena in POSIX shared memory, mapped into this process."""

    def __init__(self, file: SharedFile) -> None:
        self._file = file
        self.info = msgspec.msgpack.decode(file.header, type=ArenaInfo)
        # The tensor keeps the mapping, which goes with the last tensor that refers to it.
        mapped = mmap.mmap(file.fd, HEADER_BYTES + nbytes(self.info))
        flat = torch.frombuffer(mapped, dtype=_dtype(self.info), offset=HEADER_BYTES)
        self.tensor = flat.view(self.info.shape)

    @classmethod
    def join(cls, wanted: ArenaInfo) -> CpuArena:
        """Map the arena named `wanted.handle`, or make it."""

        def make(fd: int) -> bytes:
            _reserve(fd, HEADER_BYTES + nbytes(wanted), wanted)
            return msgspec.msgpack.encode(wanted)

        return cls(SharedFile.join(wanted.handle, make))

    @classmethod
    def attach(cls, info: ArenaInfo) -> CpuArena:
        """Map an existing arena. Raises ArenaError when it is gone."""
        return cls(attach_file(info))

    def close(self) -> None:
        """Let go of the memory; the last user removes the file."""
        self.tensor = torch.empty(0)
        self._file.close()


def attach_file(info: ArenaInfo) -> SharedFile:
    """Open the file behind an arena. Raises ArenaError when the allocation that `info` means is gone."""
    try:
        file = SharedFile.open_existing(info.handle)
    except FileNotFoundError as error:
        raise ArenaError(f"arena {info.handle} is gone, its instances have ended; say hello to the new one") from error
    if msgspec.msgpack.decode(file.header, type=ArenaInfo).id != info.id:
        file.close()
        raise ArenaError(f"arena {info.handle} was made anew since the plan; send a hello to its instance")
    return file


def nbytes(info: ArenaInfo) -> int:
    """Size of the arena in bytes."""
    return math.prod(info.shape) * _dtype(info).itemsize


def _dtype(info: ArenaInfo) -> torch.dtype:
    dtype = getattr(torch, info.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _reserve(fd: int, size: int, wanted: ArenaInfo) -> None:
    """Take the memory now: a sparse file would end in SIGBUS when /dev/shm is full later."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        free = os.statvfs(DIRECTORY)
        raise ArenaError(
            f"the {wanted.kind} arena of {wanted.device} needs {size / 2**20:.0f} MiB, {DIRECTORY} has "
            f"{free.f_bavail * free.f_frsize / 2**20:.0f} MiB free; lower `{wanted.kind}.blocks` in the configuration, "
            f"enlarge {DIRECTORY} (containers: --shm-size), or remove what dead processes left there"
        ) from error
