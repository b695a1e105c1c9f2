"""Decoder layers on a CPU with less around their products than transformers' own: single tokens take a tenth less."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLDecoderLayer
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLDecoderLayer

from epd_backend import cpu, weights
from epd_backend.attention import Binding

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [1, tokens, head_dim], as `_with_signs` makes them


class DecoderAttention(nn.Module):
    """One product for queries, keys and values, rotated together where they lie."""

    q_proj: cpu.PackedLinear
    o_proj: cpu.PackedLinear
    layer_idx: int
    head_dim: int
    scaling: float

    def forward(self, hidden: torch.Tensor, *, position_embeddings: Rotation, kv: Binding, **_: Any) -> torch.Tensor:
        """`[1, tokens, width]` to the heads' `[1, tokens, heads * head_dim]`."""
        packed, tokens = self.q_proj.packed, hidden.shape[1]
        made = cpu.product(hidden, packed.weight, packed.bias).view(tokens, -1, self.head_dim)
        kv_heads = packed.sizes[1] // self.head_dim
        cos, sin = position_embeddings
        _rotate(made[:, :-kv_heads], cos.transpose(0, 1), sin.transpose(0, 1))
        query, stored = made[:, : -2 * kv_heads], made[:, -2 * kv_heads :].view(tokens, 2, kv_heads, self.head_dim)
        kv.store(self.layer_idx, stored)
        if kv.ragged is None:
            return hidden  # of the right type; nothing reads it
        key, value = stored.unbind(1)
        return kv.attend(self.layer_idx, query, key, value, self.scaling).reshape(1, tokens, -1)


class DecoderLayer(nn.Module):
    """In the place of one of transformers', with packed weights."""

    self_attn: DecoderAttention
    mlp: Any
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def forward(self, hidden: torch.Tensor, *, position_embeddings: Rotation, kv: Binding, **_: Any) -> torch.Tensor:
        """`[1, tokens, width]` to the same."""
        normed = _norm(self.input_layernorm, hidden)
        made = self.self_attn.forward(normed, position_embeddings=position_embeddings, kv=kv)
        hidden = _add_product(hidden, made, self.self_attn.o_proj.packed)
        packed = self.mlp.gate_proj.packed
        made = cpu.product(_norm(self.post_attention_layernorm, hidden), packed.weight, packed.bias)
        gate, up = made.split_with_sizes(packed.sizes, -1)
        return _add_product(hidden, self.mlp.act_fn(gate).mul_(up), self.mlp.down_proj.packed)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotary positions, in place."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), -1)
    x.mul_(cos).addcmul_(swapped, sin)


def _with_signs(_: nn.Module, __: Any, rotation: Rotation) -> Rotation:
    """Sines with the sign that their half has in a rotation."""
    cos, sin = rotation
    half = sin.shape[-1] // 2
    return cos, torch.cat((-sin[..., :half], sin[..., half:]), -1)


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:  # transformers rounds in between
        made: torch.Tensor = module(x)
        return made
    return rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)


def _add_product(x: torch.Tensor, y: torch.Tensor, packed: cpu.Packed) -> torch.Tensor:
    """`x` and the product of `y`."""
    made: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(y, x, packed.weight, packed.bias, "add")
    return made


def speed_up(text: Any) -> None:
    """Give a text model with packed weights this way to compute, if all its decoder layers can: the hook changes what
    each of them gets."""
    layers = [layer for layer in text.layers if not isinstance(layer, weights.Elsewhere)]
    if layers and all(type(layer) in _QWEN and _is_packed(layer) for layer in layers):
        for layer in layers:
            layer.__class__ = DecoderLayer
            layer.self_attn.__class__ = DecoderAttention
        text.rotary_emb.register_forward_hook(_with_signs)


_QWEN = (Qwen2DecoderLayer, Qwen2VLDecoderLayer, Qwen2_5_VLDecoderLayer)


def _is_packed(layer: Any) -> bool:
    read = {layer.self_attn.q_proj: 3, layer.self_attn.o_proj: 1, layer.mlp.gate_proj: 2, layer.mlp.down_proj: 1}
    return all(isinstance(each, cpu.PackedLinear) and len(each.packed.sizes) == n for each, n in read.items())
