"""Attention of decoders on a CPU with less around it than in transformers' own: one product for queries, keys and
values, rotated together."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLAttention
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLAttention

from epd_backend import cpu, cpu_attention
from epd_backend.attention import Binding, attend


class DecoderAttention(nn.Module):
    """In the place of one of these classes, with packed weights."""

    q_proj: cpu.PackedLinear
    o_proj: nn.Linear
    head_dim: int
    scaling: float

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], kv: Binding, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """`[1, tokens, width]` to the same."""
        packed, tokens = self.q_proj.packed, hidden_states.shape[1]
        made = cpu.product(hidden_states, packed.weight, packed.bias).view(tokens, -1, self.head_dim)
        kv_heads = packed.sizes[1] // self.head_dim
        cos, sin = (part.view(tokens, 1, -1) for part in position_embeddings)
        rotated = cpu_attention.rotate(made[:, :-kv_heads], cos, sin)
        query, key, value = rotated[:, :-kv_heads], rotated[:, -kv_heads:], made[:, -kv_heads:]
        parts = (x.transpose(0, 1)[None] for x in (query, key, value))
        made = attend(self, *parts, kv=kv, scaling=self.scaling)[0]
        return (hidden_states if kv.ragged is None else self.o_proj(made.flatten(2))), None


def speed_up(model: nn.Module) -> None:
    """Give the decoder layers of a model with packed weights this way to compute."""
    for module in model.modules():
        packed = getattr(getattr(module, "q_proj", None), "packed", None)
        if type(module) in _QWEN and packed is not None and len(packed.sizes) == 3:
            module.__class__ = DecoderAttention


_QWEN = (Qwen2Attention, Qwen2VLAttention, Qwen2_5_VLAttention)
