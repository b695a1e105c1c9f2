"""What makes torch faster on a CPU: other ways to compute the same up to rounding, and memory that is kept."""

from __future__ import annotations

import ctypes

import torch
from torch import nn
from torch.nn.functional import linear

# Rows from which, and up to which, oneDNN beats torch's choice for float32, MKL: 1.5 times at 8 rows.
_FEW, _MANY = 4, 32


class Linear(nn.Linear):
    """Hands float32 products of a few rows, decode steps of several sequences, to oneDNN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        if x.dtype == torch.float32 and _FEW <= x.numel() // self.in_features <= _MANY:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return product
        return linear(x, self.weight, self.bias)


class PackedLinear(nn.Linear):
    """bfloat16 products with weights in oneDNN's own layout: 1.5 times as fast for a few rows, twice for hundreds.

    `packed` takes the place of `weight`.
    """

    packed: torch.Tensor

    @classmethod
    def pack(cls, layer: nn.Linear) -> None:
        """Make a layer one of these."""
        layer.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight, None)
        layer.register_parameter("weight", None)
        layer.__class__ = cls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return product


class PatchProjection(nn.Conv3d):
    """A convolution whose input is one kernel's extent is a matrix product, and seven times as fast as one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[patches, channels, *kernel]` to `[patches, out_channels, 1, 1, 1]`."""
        if x.shape[2:] != self.kernel_size or any(self.padding) or self.groups != 1:
            return super().forward(x)
        return linear(x.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


def speed_up(model: nn.Module) -> None:
    """Give the modules of a model these ways to compute. A head that shares its weights with a token embedding keeps
    their layout."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for module in model.modules():
        if type(module) is nn.Linear:
            if has_bfloat16 and module.weight.dtype == torch.bfloat16 and module.weight not in embeddings:
                PackedLinear.pack(module)
            else:
                module.__class__ = Linear
        elif type(module) is nn.Conv3d:
            module.__class__ = PatchProjection


def keep_memory() -> None:
    """Let this process keep the memory that it frees.

    glibc gives large blocks back to the kernel, and the next forward pays for them with page faults: a tenth of an
    image's encoding. Does nothing where the C library is another.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _KEEP:
            mallopt(parameter, value)


# Of malloc.h: blocks come from the heap up to the largest size that glibc allows, there is one heap for all threads,
# it grows by 64 MiB and never shrinks.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_KEEP = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, 32 << 20), (_M_TOP_PAD, 64 << 20), (_M_TRIM_THRESHOLD, 2**31 - 1))
