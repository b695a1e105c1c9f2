"""Attention on a CPU as two matrix products by oneDNN and a softmax between them.

About twice as fast as torch's `scaled_dot_product_attention`, which multiplies with MKL, and skips nothing of a mask:
here no query tile meets keys that all of it must not see. Computed in float32 whatever the tensors are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from epd_backend import cpu

NAME = "epd_products"  # for model.set_attn_implementation, of vision towers
TILE = 256  # queries at a time; tiles end where the number of keys is a multiple, so that few shapes occur
LEAST = 2**15  # queries x keys: with fewer nothing is gained
MOST = 2**23  # scores at a time for several heads: 32 MiB, the largest block that `cpu.keep_memory` lets be kept
_FUTURE = torch.full((TILE, TILE), float("-inf")).triu_(1)


def pays(queries: int, keys: int, device: torch.device) -> bool:
    """Whether `attention` is the faster way."""
    return queries * keys >= LEAST and device.type == "cpu" and cpu.has_onednn()


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, *, causal: bool
) -> torch.Tensor:
    """Query `[heads, n, dim]`, key and value `[kv_heads, m, dim]`, to `[n, heads, dim]`.

    Causal: the queries are the last n of the m tokens, and see those up to themselves.
    """
    heads, n, dim = query.shape
    kv_heads, m, _ = key.shape
    group = heads // kv_heads
    together = group if group * min(n, TILE) * m < MOST else 1  # query heads
    out = query.new_empty(n, heads // together, together, dim)
    query = (query.float() * (dim**-0.5 if scaling is None else scaling)).view(-1, together, n, dim)
    for part in range(heads // together):
        k, v = (x[part * together // group].float().contiguous() for x in (key, value))
        for first, end in _tiles(n, m - n):
            seen = m - n + end if causal else m
            scores = cpu.product(query[part, :, first:end].reshape(-1, dim), k[:seen]).view(together, -1, seen)
            if causal:
                new = end - first
                scores[..., seen - new :] += _FUTURE[:new, :new]
            weights = torch.softmax(scores, -1).view(-1, seen)
            out[first:end, part] = cpu.product(weights, v[:seen].T).view(together, -1, dim).transpose(0, 1)
    return out.flatten(1, 2)


def _tiles(n: int, past: int) -> Iterator[tuple[int, int]]:
    first = 0
    while first < n:
        end = min(n, first + TILE - (past + first) % TILE)
        yield first, end
        first = end


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions as transformers' `apply_rotary_pos_emb`, in four passes over memory instead of ten.

    The result is contiguous. `cos` and `sin` broadcast to `x`.
    """
    half = x.shape[-1] // 2
    x1, x2, cos1, cos2, sin1, sin2 = (part for whole in (x, cos, sin) for part in whole.tensor_split(2, -1))
    out = x.new_empty(x.shape)
    torch.mul(x1, cos1, out=out[..., :half]).addcmul_(x2, sin1, value=-1)
    torch.mul(x2, cos2, out=out[..., half:]).addcmul_(x1, sin2)
    return out


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer in transformers' terms, `[batch, heads, tokens, dim]` to `[batch, tokens, heads, dim]`."""
    if attention_mask is not None or not pays(query.shape[2], key.shape[2], query.device):
        made = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return made[0], None
    parts = zip(query, key, value, strict=True)
    return torch.stack([attention(*part, scaling, causal=is_causal) for part in parts]), None


AttentionInterface.register(NAME, attend)
