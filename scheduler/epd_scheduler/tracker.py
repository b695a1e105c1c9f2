"""The embedding tracker of one request (RServe section 4.1)."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from epd_scheduler.embeddings import Embedding, EmbeddingPool
from epd_scheduler.protocol import EmbedSpan
from epd_scheduler.request import Item

EVERYTHING = sys.maxsize  # tokens are ready: the prompt and what is generated


class Unit:
    """One encoder unit: prompt tokens `start ..< end` take its embedding rows."""

    __slots__ = ("embedding", "end", "index", "item", "item_index", "start")

    def __init__(self, item: Item, item_index: int, index: int, start: int) -> None:
        self.item = item
        self.item_index = item_index
        self.index = index
        self.start = start
        self.end = start + item.units[index]
        self.embedding: Embedding | None = None  # None: not encoded yet, or consumed

    @property
    def rows(self) -> int:
        """Embedding rows of the unit."""
        return self.end - self.start


class EmbeddingTracker:
    """Which embeddings a request's prompt needs, which are ready, which are consumed.

    Text tokens are always ready; the tokens of a unit are ready from the landing of its embedding on. `consumed`
    units lie wholly before the tokens whose KV is computed; their embeddings are released.
    """

    def __init__(self, items: tuple[Item, ...]) -> None:
        self.units: list[Unit] = []
        for number, item in enumerate(items):
            start = item.start
            for index, rows in enumerate(item.units):
                self.units.append(Unit(item, number, index, start))
                start += rows
        self._consumed = 0  # units before this one are consumed
        self.ready = EVERYTHING  # tokens before the first that waits for its embedding: those to schedule (Algorithm 2)
        self._landed = 0  # units before this one are ready or consumed
        self._planned = 0  # units before this one have an embedding, ready or on its way, or are consumed
        self.refresh()

    def unplanned(self) -> Iterator[Unit]:
        """Units that still need encoding, in prompt order."""
        if not self.needs_encoding():
            return iter(())
        return (unit for unit in self.units[self._planned :] if unit.embedding is None)

    def refresh(self) -> None:
        """An embedding was assigned, has landed or is gone: see how far the prompt is ready."""
        while self._landed < len(self.units):
            embedding = self.units[self._landed].embedding
            if embedding is None or not embedding.ready:
                self.ready = self.units[self._landed].start
                return
            self._landed += 1
        self.ready = EVERYTHING

    def spans(self, first: int, count: int) -> list[tuple[EmbedSpan, Embedding]]:
        """The embedding rows that tokens `first ..< first + count` take; all of them are ready."""
        spans = []
        for unit in self.units[self._consumed : self._landed]:
            low, high = max(first, unit.start), min(first + count, unit.end)
            if low < high:
                assert unit.embedding is not None
                span = EmbedSpan(low - first, high - low, low - unit.start, unit.embedding.blocks)
                spans.append((span, unit.embedding))
        return spans

    def needs_encoding(self) -> bool:
        """True while a unit is neither encoded nor on its way."""
        while self._planned < len(self.units) and self.units[self._planned].embedding is not None:
            self._planned += 1
        return self._planned < len(self.units)

    def holds(self, embedding: Embedding) -> bool:
        """True if a unit waits for or still needs this very embedding."""
        return any(unit.embedding is embedding for unit in self.units)

    def item_of(self, embedding: Embedding) -> int:
        """Index of the first item with this embedding, which `holds` is true of."""
        return next(unit.item_index for unit in self.units if unit.embedding is embedding)

    def holds_any(self) -> bool:
        """True while the request holds an embedding, ready or on its way."""
        return any(unit.embedding is not None for unit in self.units[self._consumed :])

    def consume(self, computed: int, pool: EmbeddingPool) -> None:
        """The KV of the first `computed` tokens is there: release the embeddings that lie before."""
        while self._consumed < self._landed and self.units[self._consumed].end <= computed:
            unit = self.units[self._consumed]
            assert unit.embedding is not None
            pool.release(unit.embedding)
            unit.embedding = None
            self._consumed += 1
            self._planned = max(self._planned, self._consumed)

    def forget(self, embedding: Embedding) -> None:
        """An embedding failed on its way here: its units are to be encoded again."""
        for unit in self.units:
            if unit.embedding is embedding:
                unit.embedding = None
        self._planned = self._consumed
        self.refresh()

    def reset(self, pool: EmbeddingPool | None) -> None:
        """Release everything and start anew: the sequence will be recomputed. `pool` None: the pool is gone."""
        for unit in self.units:
            if unit.embedding is not None and pool is not None:
                pool.release(unit.embedding)
            unit.embedding = None
        self._consumed = self._landed = self._planned = 0
        self.refresh()
