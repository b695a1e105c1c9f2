"""Paged KV memory: pools of blocks and the block tables that sequences hold."""

from __future__ import annotations


class BlockPool:
    """Free list of one device's KV blocks. Block ids are `0 ..< size`."""

    def __init__(self, pool_id: str, size: int, block_size: int) -> None:
        self.id = pool_id
        self.size = size
        self.block_size = block_size  # tokens a block
        self.returning = 0  # blocks of released tables that plans in flight still name
        self._free = list(range(size - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def take(self, count: int) -> tuple[int, ...]:
        """Hand out `count` blocks; the caller has checked `free`."""
        taken = tuple(self._free[len(self._free) - count :])
        del self._free[len(self._free) - count :]
        return taken

    def give_back(self, blocks: tuple[int, ...]) -> None:
        """Return blocks that nothing names any more."""
        self._free.extend(blocks)


class Table:
    """One sequence's block table in one pool.

    A plan in flight pins the table; a released table returns its blocks when the last pin is gone, so that a block
    is never handed out while a plan that names it can still run.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks: tuple[int, ...] = ()  # plans name it as it is, so it is replaced and never changed
        self.held = 0  # tokens that the blocks hold
        self._pins = 0
        self._released = False

    def grow(self, tokens: int) -> bool:
        """Make room for `tokens` tokens in all; False, and nothing taken, if the pool has too few free blocks."""
        missing = self.pool.blocks_for(tokens) - len(self.blocks)
        if missing > self.pool.free:
            return False
        if missing > 0:
            self.blocks += self.pool.take(missing)
            self.held = len(self.blocks) * self.pool.block_size
        return True

    def capacity(self) -> int:
        """Tokens that the table could hold with all free blocks of the pool."""
        return self.held + self.pool.free * self.pool.block_size

    def pin(self) -> None:
        """A plan that names the blocks is in flight."""
        self._pins += 1

    def unpin(self) -> None:
        """That plan's outcome is in, or its lost instance is idle or gone."""
        self._pins -= 1
        if self._released:
            self._return_blocks()

    def release(self) -> None:
        """The sequence needs the table no more."""
        self._released = True
        self.pool.returning += len(self.blocks)
        self._return_blocks()

    def _return_blocks(self) -> None:
        if not self._pins:
            self.pool.returning -= len(self.blocks)
            self.pool.give_back(self.blocks)
            self.blocks = ()
