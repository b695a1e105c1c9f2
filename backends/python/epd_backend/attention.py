"""Ragged paged attention for transformers' decoders.

The tokens of several sequences lie flat in one forward, `[1, tokens, hidden]`; keys and values live in the blocks of
a KV arena. transformers calls `attend` in place of its own attention (`AttentionInterface`) and passes the forward's
keyword argument `kv`, a `Binding`, through to it. No mask is registered for the name, so transformers builds none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
        halves = torch.arange(2 * self.layers).view(-1, 1, 2)  # of a block: keys and values of each layer
        blocks = ragged.write_blocks[:, None] * (2 * self.layers) + halves
        write = (blocks * self.block_size + ragged.write_offsets[:, None]).to(device)
        read = ragged.read_blocks * (2 * self.layers) + halves.transpose(1, 2)
        return Binding(
            self,
            ragged,
            tuple(_mask(segment, dtype, device) for segment in ragged.segments),
            tuple(_index(steps.tokens, device) for steps in ragged.steps),
            tuple(_padding(steps, dtype, device) for steps in ragged.steps),
            write.unbind(),
            read.view(self.layers, -1).to(device).unbind(),
            _unused(ragged, self.block_size).to(device),
        )


@dataclass(frozen=True)
class Binding:
    """A `PagedKV` and where the tokens of one forward lie in it."""

    kv: PagedKV
    ragged: Ragged | None  # None: keys and values are stored, and nothing attends to them
    masks: tuple[torch.Tensor | None, ...]  # of each segment, [tokens, context], 0 or -inf; None: it needs none
    steps: tuple[slice | torch.Tensor, ...]  # `Steps.tokens`
    paddings: tuple[torch.Tensor | None, ...]  # of each of `steps`, [rows, 1, 1, context], 0 or -inf
    write: tuple[torch.Tensor, ...]  # of each layer, int64 [tokens, 2]: slots of the new tokens' keys and values
    read: tuple[torch.Tensor, ...]  # of each layer, int64 [2 * pages]: what it reads, pages of keys, then of values
    unused: torch.Tensor  # int64, those of the keys and values read that are no token's

    def store(self, layer: int, made: torch.Tensor) -> None:
        """Write keys and values `[tokens, 2, kv_heads, head_dim]` of the model's layer `layer`."""
        self.kv.slots.index_put_((self.write[layer - self.kv.first_layer],), made)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Query `[tokens, heads, head_dim]`, key and value `[tokens, kv_heads, head_dim]`, to as much as the query.

        The keys and values are those that were stored.
        """
        assert self.ragged is not None
        layer -= self.kv.first_layer
        if self.kv.kernels is not None:
            return self.kv.kernels.attend(query, self.ragged, layer, scaling)
        heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[2]
        read = self._load(layer)
        parts: list[tuple[slice | torch.Tensor, torch.Tensor]] = []
        for steps, tokens, padding in zip(self.ragged.steps, self.steps, self.paddings, strict=True):
            rows = len(steps.tokens)  # the heads of a group as its queries: twice as fast on CPU as one query a head
            q = query[tokens].reshape(rows, kv_heads, -1, dim)
            k, v = (x[steps.context].view(rows, -1, kv_heads, dim).transpose(1, 2) for x in read)
            made = scaled_dot_product_attention(q, k, v, padding, scale=scaling)
            parts.append((tokens, made.reshape(rows, heads, dim)))
        for segment, mask in zip(self.ragged.segments, self.masks, strict=True):
            (k, v), seen = ((key, value), segment.tokens) if segment.context is None else (read, segment.context)
            q, k, v = (x.transpose(0, 1) for x in (query[segment.tokens], k[seen], v[seen]))
            if cpu_attention.pays(q.shape[1], k.shape[1], q.device):
                made = cpu_attention.attention(q, k, v, scaling, causal=True)
            else:
                causal, gqa = segment.context is None, heads != kv_heads
                q, k, v = (x[None] for x in (q, k, v))
                made = scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scaling, enable_gqa=gqa)
                made = made[0].transpose(0, 1)
            parts.append((segment.tokens, made))
        if len(parts) == 1:
            return parts[0][1]
        out = query.new_empty(query.shape)
        for tokens, made in parts:
            out[tokens] = made
        return out

    def _load(self, layer: int) -> tuple[torch.Tensor, ...]:
        """All keys and all values that the forward reads, `[pages * block_size, kv_heads, head_dim]` each."""
        read = self.kv.pages.index_select(0, self.read[layer]).flatten(0, 1)
        if len(self.unused):
            read.index_fill_(0, self.unused, 0)  # of whatever another sequence has left, NaN times 0 would be NaN
        return read.chunk(2)


@dataclass(frozen=True)
class Segment:
    """One row of a forward: its tokens attend to `context` tokens, themselves the last of these."""

    tokens: slice  # in the flat batch
    context: slice | None  # in the keys that `Binding` reads; None: the row is all there is


@dataclass(frozen=True)
class Steps:
    """Rows of one token and a past: decode steps with about as many blocks, which attend at once."""

    tokens: tuple[int, ...]  # in the flat batch
    contexts: tuple[int, ...]
    context: slice  # in the keys that `Binding` reads, as much for each row, `contexts` of it the row's


@dataclass(frozen=True)
class Ragged:
    """How the flat tokens of one forward belong to sequences and blocks; all on the CPU, until `PagedKV.bind`."""

    lengths: tuple[int, ...]  # new tokens of each row
    contexts: tuple[int, ...]  # tokens that each row's last token sees
    tables: tuple[tuple[int, ...], ...]  # blocks of each row's context
    segments: tuple[Segment, ...]
    steps: tuple[Steps, ...]
    write_blocks: torch.Tensor  # int64 [tokens], arena block of each token
    write_offsets: torch.Tensor  # int64 [tokens], place in the block
    read_blocks: torch.Tensor  # int64 [pages], block tables of the rows that have a past, joined

    @classmethod
    def of(cls, rows: Sequence[Row], lengths: Sequence[int], block_size: int) -> Ragged:
        """Lay out rows of `lengths` tokens. Raises ValueError for a row whose block table is too short."""
        segments, steps, tables = [], [], []
        blocks: list[int] = []  # no arrays: for the few numbers of a decode step they take longer
        offsets: list[int] = []
        reads: list[int] = []
        contexts = tuple(row.start + length for row, length in zip(rows, lengths, strict=True))
        alike: dict[int, list[tuple[int, int]]] = {}  # token and row of decode steps, by the size of their tables
        at = 0
        for index, (row, length, context) in enumerate(zip(rows, lengths, contexts, strict=True)):
            if len(row.blocks) * block_size < context:
                raise ValueError(f"the row of sequence {row.seq} has {len(row.blocks)} blocks for {context} tokens")
            table = row.blocks[: -(-context // block_size)]
            tables.append(table)
            blocks += [table[place // block_size] for place in range(row.start, context)]
            offsets += [place % block_size for place in range(row.start, context)]
            if row.start == 0:
                segments.append(Segment(slice(at, at + length), None))
            elif length == 1:
                alike.setdefault(len(table).bit_length(), []).append((at, index))
            else:
                begin = len(reads) * block_size
                segments.append(Segment(slice(at, at + length), slice(begin, begin + context)))
                reads += table
            at += length
        for group in alike.values():
            most, begin = max(len(tables[index]) for _, index in group), len(reads) * block_size
            for _, index in group:
                reads += tables[index] + tables[index][:1] * (most - len(tables[index]))  # filled up with a full block
            seen = tuple(contexts[index] for _, index in group)
            end = len(reads) * block_size if len(group) > 1 else begin + seen[0]
            steps.append(Steps(tuple(token for token, _ in group), seen, slice(begin, end)))
        return cls(
            tuple(lengths),
            contexts,
            tuple(tables),
            tuple(segments),
            tuple(steps),
            torch.tensor(blocks, dtype=torch.int64),
            torch.tensor(offsets, dtype=torch.int64),
            torch.tensor(reads, dtype=torch.int64),
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
    """Attention of one layer in transformers' terms, `[1, heads, tokens, dim]` to `[1, tokens, heads, dim]`."""
    assert isinstance(module.layer_idx, int)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    kv.store(module.layer_idx, torch.stack((key, value), 1))
    return (query if kv.ragged is None else kv.attend(module.layer_idx, query, key, value, scaling))[None], None


def _mask(segment: Segment, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Made once a forward; layers share it. None where `attend` is causal without."""
    if segment.context is None:
        return None
    length, context = (part.stop - part.start for part in (segment.tokens, segment.context))
    if cpu_attention.pays(length, context, device):
        return None
    mask = torch.full((length, context), float("-inf"), dtype=dtype, device=device)
    return mask.triu_(context - length + 1)


def _index(tokens: tuple[int, ...], device: torch.device) -> slice | torch.Tensor:
    """A slice where one will do: it copies nothing."""
    first, end = tokens[0], tokens[-1] + 1
    return slice(first, end) if end - first == len(tokens) else torch.tensor(tokens, device=device)


def _padding(steps: Steps, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    if len(steps.tokens) == 1:
        return None
    beyond = torch.arange(_size(steps)) >= torch.tensor(steps.contexts)[:, None]
    return torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, float("-inf"))[:, None, None].to(device)


def _unused(ragged: Ragged, block_size: int) -> torch.Tensor:
    """Of the last blocks of decode steps that attend at once, in the keys and in the values."""
    keys: list[int] = []
    for steps in ragged.steps:
        for row, seen in enumerate(steps.contexts):
            begin = steps.context.start + row * _size(steps)
            keys += range(begin + seen, begin + min(-(-seen // block_size) * block_size, _size(steps)))
    half = len(ragged.read_blocks) * block_size
    return torch.tensor(keys + [key + half for key in keys], dtype=torch.int64)


def _size(steps: Steps) -> int:
    """Of each row's context and what fills it up."""
    size: int = (steps.context.stop - steps.context.start) // len(steps.tokens)
    return size


AttentionInterface.register(NAME, attend)
