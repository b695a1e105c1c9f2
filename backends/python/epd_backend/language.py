"""One pipeline stage of the language model: token embedding, some decoder layers, the head.

Prefill and decode are one executor: a row with many tokens is a prefill chunk, a row with one a decode step, and a
batch may mix them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from epd_scheduler.protocol import BatchPlan, EmbedSpan, MigratePlan, Row

from epd_backend import attention, cpu_language, weights
from epd_backend.arena import ArenaMap, torch_device
from epd_backend.attention import Binding, PagedKV, Ragged
from epd_backend.families import UnsupportedModelError, of


@dataclass(frozen=True)
class Forward:
    """A batch on its way through the stages."""

    hidden: torch.Tensor  # [1, tokens, width]
    positions: torch.Tensor  # int64 [3, 1, tokens] (mRoPE) or [1, tokens]
    ragged: Ragged
    sampled: torch.Tensor  # int64, flat index of the last token of each row with `sample`
    ends: Ragged | None  # those tokens as rows of their own; None: they are all tokens

    def to(self, device: torch.device) -> Forward:
        """The same on another stage's device."""
        if self.hidden.device == device:
            return self
        return replace(
            self,
            hidden=self.hidden.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            sampled=self.sampled.to(device, non_blocking=True),
        )


class LastLayer(torch.nn.Module):
    """The last decoder layer: keys and values of all tokens, the rest for those alone that are to be sampled from.

    Nothing reads what it would make of the others: of 12 layers that saves a fifteenth of a prompt's work.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer: Any = layer

    def forward(
        self,
        hidden: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        kv: Binding,
        ends: Ragged | None,
        sampled: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`[1, tokens, width]` to `[1, sampled, width]`; `ends` and `sampled` as in `Forward`."""
        if ends is not None:
            normed = self.layer.input_layernorm(hidden)
            store = replace(kv, ragged=None)
            self.layer.self_attn(normed, position_embeddings=position_embeddings, kv=store, **kwargs)
            if not len(sampled):
                return hidden[:, :0]
            hidden, kv, (cos, sin) = hidden[:, sampled], kv.kv.bind(ends), position_embeddings
            position_embeddings = cos[..., sampled, :], sin[..., sampled, :]
        made: torch.Tensor = self.layer(hidden, position_embeddings=position_embeddings, kv=kv, **kwargs)
        return made


class LanguageStage:
    """Decoder layers `first ..< end` of a checkpoint on one device.

    `attach` gives it its arenas before it is used. The first stage embeds tokens, the last computes logits.
    """

    def __init__(self, path: str | Path, dtype: torch.dtype, device: str, layers: tuple[int, int]) -> None:
        self.device = torch_device(device)
        self.first, self.end = layers
        self.model = weights.load_part(path, "language", dtype, self.device, layers)
        config: Any = self.model.config
        self._head: Any = self.model.lm_head
        self._text: Any = getattr(self.model.model, of(config.to_dict()).language)
        if "sliding_attention" in (getattr(self._text.config, "layer_types", None) or ()):
            raise UnsupportedModelError(f"{path}: sliding-window attention is not supported; use another checkpoint")
        self._text.set_attn_implementation(attention.NAME)
        cpu_language.speed_up(self._text)
        last = self._text.layers[-1]
        if self.end == len(self._text.layers) and not isinstance(last, LastLayer):  # stages may share a loaded model
            self._text.layers[-1] = LastLayer(last)

    def attach(self, kv: torch.Tensor, first_layer: int, embedding: torch.Tensor | None) -> None:
        """Use a KV arena whose layers start at `first_layer`, and on a prefill instance an embedding arena."""
        self._arena, self._arena_first = kv, first_layer
        self._kv = PagedKV(kv, first_layer)
        self._embedding = embedding

    def embed(self, plan: BatchPlan, last_token: Callable[[int], int]) -> Forward:
        """Lay out a plan's rows; `last_token(seq)` stands in where a row names no token."""
        tokens: list[int] = []
        positions: list[np.ndarray[Any, np.dtype[np.int32]]] = []
        lengths: list[int] = []
        sampled: list[int] = []
        ends: list[Row] = []
        target: list[int] = []  # flat tokens that an embedding row replaces
        source: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        for row in plan.rows:
            at = len(tokens)
            tokens.extend(row.tokens or (_implied_token(row, last_token),))
            lengths.append(len(tokens) - at)
            positions.append(np.frombuffer(row.positions, np.int32).reshape(-1, lengths[-1]))
            for span in row.embeds:
                source.append(self._embedding_rows(span))
                target.extend(range(at + span.at, at + span.at + span.count))
            if row.sample:
                sampled.append(len(tokens) - 1)
                last = row.start + lengths[-1] - 1
                ends.append(row if last == row.start else msgspec.structs.replace(row, start=last))
        for replaced in target:
            tokens[replaced] = 0  # a placeholder may lie outside the vocabulary
        hidden = self._text.embed_tokens(torch.tensor(tokens, device=self.device))
        if self._embedding is not None and target:
            rows = self._embedding.flatten(0, 1)[torch.from_numpy(np.concatenate(source)).to(self.device)]
            hidden.index_copy_(0, torch.tensor(target, device=self.device), rows)
        block_size = self._kv.block_size
        index = torch.from_numpy(np.concatenate(positions, axis=1)).to(self.device, torch.int64)
        return Forward(
            hidden[None],
            index if len(index) == 1 else index[:, None],
            Ragged.of(plan.rows, lengths, block_size),
            torch.tensor(sampled, dtype=torch.int64, device=self.device),
            None if len(ends) == len(tokens) else Ragged.of(ends, [1] * len(ends), block_size),
        )

    def advance(self, forward: Forward) -> Forward:
        """Run the stage's layers; the last stage leaves the sampled tokens alone, normalised."""
        forward = forward.to(self.device)
        hidden = self._text(
            inputs_embeds=forward.hidden,
            position_ids=forward.positions,
            use_cache=False,
            kv=self._kv.bind(forward.ragged),
            ends=forward.ends,
            sampled=forward.sampled,
        ).last_hidden_state
        return replace(forward, hidden=hidden)

    def logits(self, forward: Forward) -> torch.Tensor:
        """`[rows with sample, vocabulary]`, on the last stage."""
        logits: torch.Tensor = self._head(forward.hidden[0])
        return logits

    def pull(self, plan: MigratePlan, arenas: ArenaMap) -> None:
        """Copy the blocks of a sequence, this stage's layers of them, from another instance's arenas.

        A block is contiguous in both, layers first, so it is one copy for each source arena. Raises ValueError when
        the sources lack a layer.
        """
        missing = set(range(self.first, self.end))
        for info in plan.source:
            first, end = max(self.first, info.first_layer), min(self.end, info.first_layer + info.shape[1])
            if first >= end:
                continue
            missing -= set(range(first, end))
            source = arenas.open(info)[:, first - info.first_layer : end - info.first_layer]
            target = self._arena[:, first - self._arena_first : end - self._arena_first]
            for there, here in zip(plan.source_blocks, plan.blocks, strict=True):
                target[here].copy_(source[there], non_blocking=True)
        if missing:
            raise ValueError(f"the source arenas of plan {plan.id} lack decoder layers {sorted(missing)}; name all")

    def _embedding_rows(self, span: EmbedSpan) -> np.ndarray[Any, np.dtype[np.int64]]:
        if self._embedding is None:
            raise ValueError("a row takes embeddings, but this instance has no embedding arena; give it role prefill")
        index = np.arange(span.first, span.first + span.count)
        size = self._embedding.shape[1]
        rows: np.ndarray[Any, np.dtype[np.int64]] = np.array(span.blocks, np.int64)[index // size] * size + index % size
        return rows


def _implied_token(row: Row, last_token: Callable[[int], int]) -> int:
    if row.open is not None and row.open.output:
        return row.open.output[-1]
    return last_token(row.seq)
