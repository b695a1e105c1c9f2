"""The paged embedding cache of one prefill device (EPD's MM cache and MMBlockManager), keyed by content."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from epd_scheduler.blocks import BlockPool
from epd_scheduler.protocol import ArenaInfo

if TYPE_CHECKING:
    from epd_scheduler.sequence import Sequence

Key = tuple[str, int]  # content key of the item, index of the unit


class Embedding:
    """The embedding rows of one encoder unit, in the arena or on their way there.

    `users` counts the requests' units that hold it, `pins` the plans in flight that write or read it.
    """

    def __init__(self, key: Key, rows: int, blocks: tuple[int, ...]) -> None:
        self.key = key
        self.rows = rows
        self.blocks = blocks
        self.ready = False
        self.users = 1
        self.pins = 1  # the encode plan
        self.waiting: list[Sequence] = []  # who asked for it before it landed, and may have gone since


class EmbeddingPool:
    """Blocks of one embedding arena. An embedding without users stays as cache until its blocks are needed."""

    def __init__(self, arena: ArenaInfo) -> None:
        self.arena = arena
        self._blocks = BlockPool(arena.id, arena.shape[0], arena.shape[1])
        self._entries: dict[Key, Embedding] = {}
        self._unused: OrderedDict[Key, Embedding] = OrderedDict()  # least recently used first
        self._unused_blocks = 0
        self.returning = 0  # blocks without users that plans in flight still name

    @property
    def size(self) -> int:
        """Blocks of the arena."""
        return self._blocks.size

    @property
    def used(self) -> int:
        """Blocks that hold embeddings of live requests or are being written."""
        return self.size - self.available

    @property
    def available(self) -> int:
        """Blocks that are free or hold cache that no request uses."""
        return self._blocks.free + self._unused_blocks

    def blocks_for(self, rows: int) -> int:
        """Blocks that hold `rows` rows."""
        return self._blocks.blocks_for(rows)

    def find(self, key: Key) -> Embedding | None:
        """Take a share of an embedding that is there or being written."""
        embedding = self._entries.get(key)
        if embedding is None:
            return None
        if not embedding.users:
            if embedding.pins:
                self.returning -= len(embedding.blocks)
            else:
                del self._unused[key]
                self._unused_blocks -= len(embedding.blocks)
        embedding.users += 1
        return embedding

    def create(self, key: Key, rows: int) -> Embedding | None:
        """Reserve and pin blocks for an embedding about to be encoded, evicting cache; None if too few are there."""
        need = self.blocks_for(rows)
        if need > self.available:
            return None
        while self._blocks.free < need:
            _, old = self._unused.popitem(last=False)
            self._unused_blocks -= len(old.blocks)
            self._drop(old)
        embedding = Embedding(key, rows, self._blocks.take(need))
        self._entries[key] = embedding
        return embedding

    def landed(self, embedding: Embedding) -> None:
        """The encode plan's outcome is in and good."""
        embedding.ready = True
        for sequence in embedding.waiting:
            sequence.tracker.refresh()
        embedding.waiting.clear()
        self.unpin(embedding)

    def failed(self, embedding: Embedding) -> None:
        """The encode plan failed."""
        self.abandon(embedding)
        self.reclaim(embedding)

    def abandon(self, embedding: Embedding) -> None:
        """The encode plan will have no outcome but may run yet: the embedding is to be made again, in other blocks."""
        for sequence in embedding.waiting:
            sequence.tracker.forget(embedding)
        embedding.waiting.clear()
        if embedding.users:
            self.returning += len(embedding.blocks)
        del self._entries[embedding.key]

    def reclaim(self, embedding: Embedding) -> None:
        """Nothing of the plan of an abandoned embedding can still run."""
        self.returning -= len(embedding.blocks)
        self._blocks.give_back(embedding.blocks)

    def pin(self, embedding: Embedding) -> None:
        """A row in flight reads the embedding."""
        embedding.pins += 1

    def unpin(self, embedding: Embedding) -> None:
        """The outcome of a plan that names the embedding is in, or its lost instance is idle or gone."""
        embedding.pins -= 1
        if not embedding.users and not embedding.pins:
            self.returning -= len(embedding.blocks)
            self._retire(embedding)

    def release(self, embedding: Embedding) -> None:
        """One user less."""
        embedding.users -= 1
        if embedding.users:
            return
        if embedding.pins:
            self.returning += len(embedding.blocks)
        else:
            self._retire(embedding)

    def _retire(self, embedding: Embedding) -> None:
        self._unused[embedding.key] = embedding
        self._unused_blocks += len(embedding.blocks)

    def _drop(self, embedding: Embedding) -> None:
        del self._entries[embedding.key]
        self._blocks.give_back(embedding.blocks)
