"""Drives workers by hand: a scheduler small enough to choose odd chunks, shuffled blocks and any mix on purpose."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from epd_backend.worker import Worker
from epd_scheduler.protocol import (
    ArenaInfo,
    BatchPlan,
    EmbedSpan,
    EncodePlan,
    EncodeUnit,
    Exchange,
    MigratePlan,
    Outcome,
    Plan,
    Row,
    SamplerState,
    Sampling,
    WorkerInfo,
    decode_reply,
    encode,
)

_ids = itertools.count(1)

NO_ARENA = ArenaInfo("none", "kv", "cpu:0", "epd_none", (1, 4, 2, 16, 1, 32), "float32")


def plan_id() -> int:
    return next(_ids)


def hello(worker: Worker) -> WorkerInfo:
    info = decode_reply(worker.exchange(encode(Exchange(hello=True)), memoryview(b""))).info
    assert info is not None
    return info


def run(worker: Worker, *plans: Plan, media: Sequence[bytes] = ()) -> list[Outcome]:
    """Submit plans at once; all outcomes, in the order of the plans. Fails where a plan did."""
    outcomes = run_any(worker, *plans, media=media)
    assert [o.error for o in outcomes] == [None] * len(outcomes)
    return outcomes


def run_any(worker: Worker, *plans: Plan, media: Sequence[bytes] = ()) -> list[Outcome]:
    offsets = itertools.accumulate((len(part) for part in media), initial=0)
    spans = {key: (at, len(part)) for key, (at, part) in enumerate(zip(offsets, media, strict=False))}
    exchange = Exchange(plans=plans, media=spans, wait_s=10.0)
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(plans):
        reply = decode_reply(worker.exchange(encode(exchange), memoryview(b"".join(media))))
        assert reply.outcomes, "no outcome within ten seconds"
        outcomes |= {outcome.plan: outcome for outcome in reply.outcomes}
        exchange = Exchange(wait_s=10.0)
    return [outcomes[plan.id] for plan in plans]


class Blocks:
    """Hands out an arena's blocks in shuffled order."""

    def __init__(self, arena: ArenaInfo, seed: int) -> None:
        self.size = arena.shape[-2] if arena.kind == "embedding" else arena.shape[3]
        self._free = list(range(arena.shape[0]))
        random.Random(seed).shuffle(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        return tuple(self._free.pop() for _ in range(count))

    def cover(self, tokens: int) -> tuple[int, ...]:
        return self.take(-(-tokens // self.size))


class Prompt:
    """A tokenised prompt with the rows of each image, and where its parts lie in the arenas."""

    def __init__(self, seq: int, tokens: list[int], positions: Any, delta: int, images: list[tuple[int, int]]) -> None:
        self.seq = seq
        self.tokens = tokens
        self.positions = np.ascontiguousarray(positions, np.int32)
        self.delta = delta
        self.images = images  # (first placeholder, rows)
        self.embeddings: list[tuple[int, ...]] = []  # blocks of each image
        self.blocks: tuple[int, ...] = ()

    def chunk(self, start: int, end: int, sampling: Sampling | None = None) -> Row:
        spans = []
        for (first, rows), blocks in zip(self.images, self.embeddings, strict=True):
            lo, hi = max(first, start), min(first + rows, end)
            if lo < hi:
                spans.append(EmbedSpan(at=lo - start, count=hi - lo, first=lo - first, blocks=blocks))
        last = end == len(self.tokens)
        return Row(
            seq=self.seq,
            start=start,
            tokens=tuple(self.tokens[start:end]),
            positions=np.ascontiguousarray(self.positions[:, start:end]).tobytes(),
            blocks=self.blocks,
            embeds=tuple(spans),
            sample=last,
            open=SamplerState(sampling or Sampling(), prompt=tuple(self.tokens)) if last else None,
        )

    def step(self, generated: int, tokens: tuple[int, ...] = (), state: SamplerState | None = None) -> Row:
        """The decode step that takes generated token number `generated - 1` and samples number `generated`."""
        at = len(self.tokens) + generated - 1
        position = np.full((len(self.positions), 1), at + self.delta, np.int32)
        return Row(self.seq, at, tokens, position.tobytes(), self.blocks, sample=True, open=state)


def encode_plan(worker: WorkerInfo, arena: ArenaInfo, prompts: Sequence[Prompt], blocks: Blocks) -> EncodePlan:
    units, media = [], itertools.count()
    for prompt in prompts:
        prompt.embeddings = [blocks.cover(rows) for _, rows in prompt.images]
        for item, (_, rows) in enumerate(prompt.images):
            units.append(EncodeUnit(prompt.seq, item, 0, next(media), rows, prompt.embeddings[item]))
    return EncodePlan(plan_id(), worker.name, arena, tuple(units))


def batch(*rows: Row, close: tuple[int, ...] = ()) -> BatchPlan:
    return BatchPlan(plan_id(), "", rows, close)


def migrate(prompt: Prompt, source: WorkerInfo, blocks: Blocks, room: int) -> MigratePlan:
    """Move a prompt's KV to another instance, with room for as many tokens more."""
    used = -(-len(prompt.tokens) // blocks.size)
    there, prompt.blocks = prompt.blocks, blocks.cover(len(prompt.tokens) + room)
    return MigratePlan(plan_id(), "", prompt.seq, source.kv, there[:used], prompt.blocks[:used])
