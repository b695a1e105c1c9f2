"""Ragged paged attention for transformers' decoders.

The tokens of several sequences lie flat in one forward, `[1, tokens, hidden]`; keys and values live in the blocks of
a KV arena. transformers calls `attend` in place of its own attention (`AttentionInterface`) and passes the forward's
keyword argument `kv` through to it. No mask is registered for the name, so transformers builds none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from epd_scheduler.protocol import Row
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from epd_backend import cpu_attention
from epd_backend.attention_flashinfer import FlashInfer, usable

NAME = "epd_ragged"  # for model.set_attn_implementation


class PagedKV:
    """A KV arena `[blocks, layers, 2, block_size, kv_heads, head_dim]` as the layers of one stage use it."""

    def __init__(self, arena: torch.Tensor, first_layer: int) -> None:
        blocks, self.layers, _, self.block_size, heads, dim = arena.shape
        self.first_layer = first_layer
        self.pages = arena.view(blocks * self.layers * 2, self.block_size, heads, dim)
        self.slots = arena.view(blocks * self.layers * 2 * self.block_size, heads, dim)
        self.kernels = FlashInfer(arena) if usable(arena) else None

    def bind(self, ragged: Ragged) -> Binding:
        """Addresses of a forward's blocks in this arena, to be made once a forward and passed as `kv`."""
        device, dtype = self.slots.device, self.slots.dtype
        return Binding(
            self,
            ragged,
            tuple(_mask(segment, dtype, device) for segment in ragged.segments),
            (ragged.write_blocks * (2 * self.layers * self.block_size) + ragged.write_offsets).to(device),
            (ragged.read_blocks * (2 * self.layers)).to(device),
        )


@dataclass(frozen=True)
class Binding:
    """A `PagedKV` and where the tokens of one forward lie in it, for decoder layer `first_layer`."""

    kv: PagedKV
    ragged: Ragged | None  # None: keys and values are stored, and nothing attends to them
    masks: tuple[torch.Tensor | None, ...]  # of each segment, [tokens, context], 0 or -inf; None: it needs none
    write: torch.Tensor  # int64 [tokens], key slot of each new token
    read: torch.Tensor  # int64 [pages], key page of each block that is read

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values `[tokens, kv_heads, head_dim]` of the arena's layer `layer`."""
        write = self.write + 2 * layer * self.kv.block_size
        self.kv.slots.index_copy_(0, write, key)
        self.kv.slots.index_copy_(0, write + self.kv.block_size, value)

    def load(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values that the forward reads, `[pages * block_size, kv_heads, head_dim]` each, in one copy."""
        read = self.read + 2 * layer
        pages = self.kv.pages
        return pages.index_select(0, read).flatten(0, 1), pages.index_select(0, read + 1).flatten(0, 1)


@dataclass(frozen=True)
class Segment:
    """One row of a forward: its tokens attend to `context` tokens, themselves the last of these."""

    tokens: slice  # in the flat batch
    context: slice | None  # in the keys that `Binding.load` returns; None: the row is all there is


@dataclass(frozen=True)
class Ragged:
    """How the flat tokens of one forward belong to sequences and blocks; all on the CPU, until `PagedKV.bind`."""

    lengths: tuple[int, ...]  # new tokens of each row
    contexts: tuple[int, ...]  # tokens that each row's last token sees
    tables: tuple[npt.NDArray[np.int64], ...]  # blocks of each row's context
    segments: tuple[Segment, ...]
    write_blocks: torch.Tensor  # int64 [tokens], arena block of each token
    write_offsets: torch.Tensor  # int64 [tokens], place in the block
    read_blocks: torch.Tensor  # int64 [pages], block tables of the rows that have a past, joined

    @classmethod
    def of(cls, rows: Sequence[Row], lengths: Sequence[int], block_size: int) -> Ragged:
        """Lay out rows of `lengths` tokens. Raises ValueError for a row whose block table is too short."""
        segments, blocks, offsets, tables, reads = [], [], [], [], []
        at = pages = 0
        for row, length in zip(rows, lengths, strict=True):
            context = row.start + length
            if len(row.blocks) * block_size < context:
                raise ValueError(f"the row of sequence {row.seq} has {len(row.blocks)} blocks for {context} tokens")
            index = np.arange(row.start, context)
            table = np.array(row.blocks[: -(-context // block_size)], np.int64)
            tables.append(table)
            blocks.append(table[index // block_size])
            offsets.append(index % block_size)
            tokens = slice(at, at + length)
            at += length
            if row.start == 0:
                segments.append(Segment(tokens, None))
                continue
            segments.append(Segment(tokens, slice(pages * block_size, pages * block_size + context)))
            reads.append(table)
            pages += len(table)
        return cls(
            tuple(lengths),
            tuple(row.start + length for row, length in zip(rows, lengths, strict=True)),
            tuple(tables),
            tuple(segments),
            _int64(blocks),
            _int64(offsets),
            _int64(reads),
        )


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _: torch.Tensor | None = None,
    *,
    kv: Binding,
    scaling: float | None = None,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer: query `[1, heads, tokens, dim]`, key and value `[1, kv_heads, tokens, dim]`.

    Returns `[1, tokens, heads, dim]`.
    """
    assert isinstance(module.layer_idx, int)
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[3]
    layer, ragged = module.layer_idx - kv.kv.first_layer, kv.ragged
    kv.store(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if ragged is None:
        return query.transpose(1, 2), None
    if kv.kv.kernels is not None:
        return kv.kv.kernels.attend(query[0].transpose(0, 1), ragged, layer, scaling)[None], None
    past_keys, past_values = kv.load(layer)
    out = query.new_empty(query.shape[2], heads, dim)
    for segment, mask in zip(ragged.segments, kv.masks, strict=True):
        q = query[:, :, segment.tokens]
        length = q.shape[2]
        if segment.context is None:
            k, v = key[:, :, segment.tokens], value[:, :, segment.tokens]
        else:
            k = past_keys[segment.context].transpose(0, 1)[None]
            v = past_values[segment.context].transpose(0, 1)[None]
        if length == 1:  # the heads of a group as its queries: twice as fast on CPU as one query a head
            q = q.reshape(1, kv_heads, heads // kv_heads, dim)
            result = scaled_dot_product_attention(q, k, v, scale=scaling).reshape(1, heads, dim)
        elif cpu_attention.pays(length, k.shape[2], q.device):
            result = cpu_attention.attention(q[0], k[0], v[0], scaling, causal=True)
        else:
            result = scaled_dot_product_attention(
                q, k, v, mask, is_causal=segment.context is None, scale=scaling, enable_gqa=heads != kv_heads
            )[0].transpose(0, 1)
        out[segment.tokens] = result
    return out[None], None


def _mask(segment: Segment, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Made once a forward; layers share it. None where `attend` is causal without, or a token sees everything."""
    if segment.context is None:
        return None
    length, context = (part.stop - part.start for part in (segment.tokens, segment.context))
    if length == 1 or cpu_attention.pays(length, context, device):
        return None
    mask = torch.full((length, context), float("-inf"), dtype=dtype, device=device)
    return mask.triu_(context - length + 1)


def _int64(parts: list[Any]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts)) if parts else torch.empty(0, dtype=torch.int64)


AttentionInterface.register(NAME, attend)
