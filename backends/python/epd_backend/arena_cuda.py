"""CUDA arenas: a plain `cudaMalloc`, shared with other processes by its IPC handle.

Not from torch's caching allocator, whose blocks share one `cudaMalloc`: an IPC handle names a whole allocation. The
handle rides in a descriptor file under the same protocol as the CPU arenas (`shared_file`), so that a stale one is
recognised. CUDA forbids a process to open its own handle: a second user in the maker's process shares its tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

import msgspec
import torch
from epd_scheduler.protocol import ArenaInfo

from epd_backend import procfs
from epd_backend.arena import ArenaError, attach_file, nbytes
from epd_backend.shared_file import SharedFile

_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * 64),)  # cudaIpcMemHandle_t, passed by value


class _Descriptor(ArenaInfo, frozen=True):
    """What the descriptor file says; an ArenaInfo with the way to the memory."""

    ipc: bytes = b""
    pid: int = 0


class _Span:
    """Device memory in the form that torch.as_tensor takes."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (pointer, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


_made: dict[str, torch.Tensor] = {}  # arenas that this process allocated, by id


class CudaArena:
    """An arena in the memory of one GPU, allocated by this process or mapped from another."""

    def __init__(self, file: SharedFile) -> None:
        self._file = file
        said = msgspec.msgpack.decode(file.header, type=_Descriptor)
        self.info = ArenaInfo(**{name: getattr(said, name) for name in ArenaInfo.__struct_fields__})
        self._own = said.pid == os.getpid()
        try:
            if self._own:
                self.tensor = _made[said.id]
            else:
                _require_maker(said)
                with torch.cuda.device(said.device):
                    self.tensor = _as_tensor(_open_handle(said), said)
        except BaseException:
            file.close()
            raise

    @classmethod
    def join(cls, wanted: ArenaInfo) -> CudaArena:
        """Map the arena that `wanted.handle` describes, or allocate it. Raises ArenaError when its maker is gone."""

        def make(_: int) -> bytes:
            with torch.cuda.device(wanted.device):
                pointer = _allocate(wanted)
                handle = _get_handle(pointer)
            _made[wanted.id] = _as_tensor(pointer, wanted).zero_()
            torch.cuda.synchronize(wanted.device)
            fields = {name: getattr(wanted, name) for name in ArenaInfo.__struct_fields__}
            return msgspec.msgpack.encode(_Descriptor(**fields, ipc=handle, pid=os.getpid()))

        return cls(SharedFile.join(wanted.handle, make))

    @classmethod
    def attach(cls, info: ArenaInfo) -> CudaArena:
        """Map an existing arena. Raises ArenaError when it is gone, or its maker is."""
        return cls(attach_file(info))

    def close(self) -> None:
        """Unmap another process's memory; free one's own, unless others still map it: then the process's end does."""
        if self._file.fd < 0:
            return
        torch.cuda.synchronize(self.info.device)
        pointer = ctypes.c_void_p(self.tensor.data_ptr())
        self.tensor = torch.empty(0)
        if not self._own:
            _check(_runtime().cudaIpcCloseMemHandle(pointer), "cudaIpcCloseMemHandle")
        if self._file.close() and self._own:
            del _made[self.info.id]
            _check(_runtime().cudaFree(pointer), "cudaFree")


def _allocate(wanted: ArenaInfo) -> int:
    pointer = ctypes.c_void_p()
    status = _runtime().cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes(wanted)))
    if status:
        free, _ = torch.cuda.mem_get_info()
        raise ArenaError(
            f"the {wanted.kind} arena of {wanted.device} needs {nbytes(wanted) / 2**20:.0f} MiB, "
            f"{free / 2**20:.0f} MiB are free ({_name(status)}); lower `{wanted.kind}.blocks` in the configuration"
        )
    assert pointer.value is not None
    return pointer.value


def _get_handle(pointer: int) -> bytes:
    handle = _IpcHandle()
    _check(_runtime().cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(pointer)), "cudaIpcGetMemHandle")
    return bytes(handle)


def _open_handle(said: _Descriptor) -> int:
    pointer = ctypes.c_void_p()
    handle = _IpcHandle.from_buffer_copy(said.ipc)
    status = _runtime().cudaIpcOpenMemHandle(ctypes.byref(pointer), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
    _check(status, f"cudaIpcOpenMemHandle of {said.handle}, made by process {said.pid}")
    assert pointer.value is not None
    return pointer.value


def _require_maker(said: _Descriptor) -> None:
    """CUDA opens no handle of a process that has ended."""
    with contextlib.suppress(OSError):
        if procfs.stat(said.pid).alive:
            return
    raise ArenaError(
        f"the {said.kind} arena of {said.device} was made by process {said.pid}, which has ended, and other instances "
        "still map it, so that it can be neither opened nor made anew; unload all worker models, then load them again, "
        "or restart the server"
    )


def _as_tensor(pointer: int, info: ArenaInfo) -> torch.Tensor:
    raw = torch.as_tensor(_Span(pointer, nbytes(info)), device=info.device)
    return raw.view(getattr(torch, info.dtype)).view(info.shape)


def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded into this process."""
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so"):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(name)
            library.cudaGetErrorString.restype = ctypes.c_char_p
            return library
    raise ArenaError("libcudart is not to be found; install a CUDA build of torch or add CUDA to LD_LIBRARY_PATH")


def _name(status: int) -> str:
    return str(_runtime().cudaGetErrorString(status).decode())


def _check(status: int, call: str) -> None:
    if status:
        raise ArenaError(
            f"{call}: {_name(status)}; check that the instances see the same GPUs and share /dev/shm "
            "(containers: --ipc=host), and restart the server if an instance died"
        )
