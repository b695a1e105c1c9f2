"""What makes torch faster on a CPU: other ways to compute the same up to rounding, and memory that is kept."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import nn
from torch.nn.functional import linear


class Linear(nn.Linear):
    """float32 products by oneDNN where torch takes MKL: up to twice as fast for the few rows of decode steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        return product(x, self.weight, self.bias)


class Packed:
    """The weights of layers that read the same input, in oneDNN's own layout, for one product in place of several.

    The layers are called one after the other with the same tensor: the first call computes for all.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.sizes = [layer.out_features for layer in layers]
        weights = [layer.weight.detach() for layer in layers]  # else autograd's graph keeps them in memory
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        together = torch.cat(weights) if len(weights) > 1 else weights[0]
        self.weight = torch.ops.mkldnn._reorder_linear_weight(together, None)
        self.bias = torch.cat(biases) if biases else None
        self._input: torch.Tensor | None = None
        self._parts: Sequence[torch.Tensor] = ()

    def product(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """The output of layer `index`, a view into that of all."""
        if x is not self._input:
            self._input, self._parts = x, torch.functional.split(product(x, self.weight, self.bias), self.sizes, -1)
        part = self._parts[index]
        if index + 1 == len(self.sizes):
            self._input, self._parts = None, ()
        return part


class PackedLinear(nn.Linear):
    """A layer with its weights in `packed`, at `index`: for a few rows again up to twice as fast."""

    packed: Packed
    index: int

    @classmethod
    def pack(cls, layers: Sequence[nn.Linear]) -> None:
        """Make layers that read the same input some of these."""
        packed = Packed(layers)
        for index, layer in enumerate(layers):
            layer.__dict__.update(packed=packed, index=index)
            layer.register_parameter("weight", None)
            layer.register_parameter("bias", None)
            layer.__class__ = cls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        return self.packed.product(x, self.index)


class PatchProjection(nn.Conv3d):
    """A convolution whose input is one kernel's extent is a matrix product, and seven times as fast as one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[patches, channels, *kernel]` to `[patches, out_channels, 1, 1, 1]`."""
        if x.shape[2:] != self.kernel_size or any(self.padding) or self.groups != 1:
            return super().forward(x)
        multiply = product if x.dtype in _onednn_dtypes() else linear
        return multiply(x.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


def speed_up(model: nn.Module) -> None:
    """Give the modules of a model these ways to compute. A head that shares its weights with a token embedding keeps
    their layout."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    dtypes = _onednn_dtypes()

    def may_pack(layer: object) -> TypeGuard[nn.Linear]:
        return type(layer) is nn.Linear and layer.weight.dtype in dtypes and layer.weight not in embeddings

    for module in model.modules():
        for names in _SAME_INPUT:
            layers = [layer for name in names if may_pack(layer := getattr(module, name, None))]
            if len(layers) == len(names) and len({layer.bias is None for layer in layers}) == 1:
                PackedLinear.pack(layers)
        if may_pack(module):
            PackedLinear.pack([module])
        elif type(module) is nn.Linear and module.weight.dtype == torch.float32 in dtypes:
            module.__class__ = Linear
        elif type(module) is nn.Conv3d:
            module.__class__ = PatchProjection


# What transformers calls the layers of a block that read the same input.
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def has_onednn() -> bool:
    """Whether torch was built with oneDNN, as it is for x86."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _onednn_dtypes() -> set[torch.dtype]:
    if not has_onednn():
        return set()
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return {torch.float32}
    return {torch.float32, torch.bfloat16}


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`nn.functional.linear` by oneDNN. `weight` is packed, contiguous or the transposed view of what is contiguous:
    for other strides it is a thousand times slower."""
    made: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return made


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
