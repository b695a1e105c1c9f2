"""Ragged paged attention against one plain attention a sequence."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from epd_backend import cpu_attention
from epd_backend.attention import PagedKV, Ragged, attend
from epd_scheduler.protocol import Row

BLOCK, HEADS, KV_HEADS, DIM, LAYERS, FIRST = 4, 6, 2, 8, 3, 5


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """Causal attention of the last `len(query)` tokens of a sequence, all `[tokens, heads, dim]`."""
    past = len(key) - len(query)
    out = torch.empty_like(query)
    for i, h in ((i, h) for i in range(len(query)) for h in range(HEADS)):
        seen = slice(0, past + i + 1)
        group = h * KV_HEADS // HEADS
        weights = (key[seen, group] @ query[i, h] * scaling).softmax(-1)
        out[i, h] = weights @ value[seen, group]
    return out


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("scaling", [DIM**-0.5, 0.2])
@pytest.mark.parametrize("products", [False, True])
def test_rows_of_any_length_and_past_are_exact(monkeypatch, seed, scaling, products):
    """Sequences grow by random chunks, decode steps among them, in random mixes over shuffled blocks."""
    if products:
        monkeypatch.setattr(cpu_attention, "LEAST", 1)
        monkeypatch.setattr(cpu_attention, "TILE", 3)
    rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
    arena = torch.full((60, LAYERS, 2, BLOCK, KV_HEADS, DIM), float("nan"))  # a slot that is read shows
    paged = PagedKV(arena, FIRST)
    free = rng.sample(range(60), 60)
    sequences = [SimpleNamespace(key=[], value=[], blocks=[], seq=seq) for seq in range(5)]
    module = SimpleNamespace(layer_idx=FIRST + 1)

    for _ in range(8):
        rows, lengths, queries = [], [], []
        for sequence in rng.sample(sequences, rng.randint(1, 5)):
            length, start = rng.choice([1, 1, 2, 5]), len(sequence.key)
            while len(sequence.blocks) * BLOCK < start + length:
                sequence.blocks.append(free.pop())
            rows.append(Row(sequence.seq, start, (0,) * length, b"", tuple(sequence.blocks)))
            lengths.append(length)
            queries.append(torch.randn(length, HEADS, DIM, generator=torch_rng))
            sequence.key += torch.randn(length, KV_HEADS, DIM, generator=torch_rng)
            sequence.value += torch.randn(length, KV_HEADS, DIM, generator=torch_rng)
        new = [(sequences[row.seq], row.start, length) for row, length in zip(rows, lengths, strict=True)]
        key = torch.cat([torch.stack(s.key[at : at + n]) for s, at, n in new])
        value = torch.cat([torch.stack(s.value[at : at + n]) for s, at, n in new])
        ragged = Ragged.of(rows, lengths, BLOCK)
        out, _ = attend(
            module,
            torch.cat(queries).transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            None,
            kv=paged.bind(ragged),
            scaling=scaling,
        )
        expected = [
            plain(q, torch.stack(s.key), torch.stack(s.value), scaling)
            for q, (s, _, _) in zip(queries, new, strict=True)
        ]
        torch.testing.assert_close(out[0], torch.cat(expected), rtol=1e-5, atol=1e-5)
    untouched = torch.ones(LAYERS, dtype=torch.bool)
    untouched[1] = False
    assert arena[:, untouched].isnan().all()
