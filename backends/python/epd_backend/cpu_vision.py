"""Attention of vision towers on a CPU: a tenth of an image's encoding less than transformers' own.

Qwen's towers attend to all windows of a length at once; the others just take `cpu_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionAttention
from transformers.models.qwen2_vl.modeling_qwen2_vl import VisionAttention as Qwen2VLVisionAttention

from epd_backend import cpu, cpu_attention


class WindowedAttention(nn.Module):
    """In the place of either class."""

    qkv: nn.Linear
    proj: nn.Linear
    num_heads: int
    scaling: float

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """`[tokens, width]` to the same; tokens see those between the same two of `cu_seqlens`."""
        tokens = len(hidden_states)
        qkv = self.qkv(hidden_states).view(tokens, 3, self.num_heads, -1).permute(1, 2, 0, 3)
        query, key = cpu_attention.rotate(qkv[:2].float(), *position_embeddings)
        value = qkv[2].float().contiguous()
        out = hidden_states.new_empty(tokens, self.num_heads, query.shape[-1])
        for first, length, count in _windows(cu_seqlens.tolist()):
            span = slice(first, first + length * count)
            out[span] = self._attend(*(x[:, span].unflatten(1, (count, length)) for x in (query, key, value)))
        made: torch.Tensor = self.proj(out.flatten(1))
        return made

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`[heads, windows, length, dim]` to `[windows * length, heads, dim]`."""
        heads, windows, length, dim = query.shape
        if cpu_attention.pays(length, length, query.device):
            each = zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True)
            return torch.cat([cpu_attention.attention(q, k, v, self.scaling, causal=False) for q, k, v in each])
        q, k, v = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        weights = torch.softmax(torch.bmm(q * self.scaling, k.transpose(1, 2)), -1)
        return torch.bmm(weights, v).view(heads, windows * length, dim).transpose(0, 1)


def _windows(bounds: list[int]) -> Iterator[tuple[int, int, int]]:
    """First token, length and number of windows that follow each other and are of one length."""
    first = 0
    for length, run in groupby(end - start for start, end in pairwise(bounds)):
        count = len(list(run))
        yield first, length, count
        first += length * count


def speed_up(tower: Any) -> None:
    """Give the attention of a vision tower these ways to compute, where there is oneDNN."""
    if not cpu.has_onednn():
        return
    tower.set_attn_implementation(cpu_attention.NAME)
    for module in tower.modules():
        if type(module) in (Qwen2_5_VLVisionAttention, Qwen2VLVisionAttention):
            module.__class__ = WindowedAttention
