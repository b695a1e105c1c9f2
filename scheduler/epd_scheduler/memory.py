"""Who gets memory when there is too little, and who must give it back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from epd_scheduler.blocks import BlockPool, Table
from epd_scheduler.embeddings import Embedding, EmbeddingPool
from epd_scheduler.instance import Instance
from epd_scheduler.request import RefusedError, Request
from epd_scheduler.sequence import Rank, Sequence
from epd_scheduler.tracker import Unit

if TYPE_CHECKING:
    from epd_scheduler.core import Core


class _Claim(NamedTuple):
    rank: Rank
    sequence: Sequence
    epoch: int

    @property
    def stands(self) -> bool:
        """False once the sequence has ended or was preempted."""
        return self.sequence.epoch == self.epoch


class Memory:
    """Memory goes by rank.

    * To grow, a sequence takes blocks from those that it outranks, the last of them first, by preemption.
    * To start, it waits for free blocks for all its known tokens; only the first of all sequences preempts for that.
    * A sequence that reserves (protected classes) preempts to start, takes all blocks that it can ever need and all
      its embeddings before it prefills, and is never preempted afterwards: it waits for nothing but computation.
    * While a sequence waits for blocks, nobody that it outranks takes any from the pool, in this step or the next,
      where it may be asked later than they are.

    So the first of all sequences always gets what it needs, ends, and the next one is first: progress.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiting: dict[str, _Claim] = {}  # pool id -> the first of those that wait for it in this step
        self._claims: dict[str, _Claim] = {}  # the same of the step before
        # By pool id all that may hold some of it, by seq: those to look at for victims.
        self._holders: defaultdict[str, dict[int, Sequence]] = defaultdict(dict)

    def begin_step(self) -> None:
        """Who still waits will say so again; until then its claim of the last step stands."""
        self._claims, self._waiting = self._waiting, {}

    def released(self, sequence: Sequence) -> None:
        """A sequence holds no memory any more."""
        for holders in self._holders.values():
            holders.pop(sequence.seq, None)

    def check_fits(self, request: Request) -> None:
        """Raise RefusedError for a request that could not run even alone."""
        kv, embedding = self._core.config.kv, self._core.config.embedding
        tokens = len(request.tokens) + request.max_tokens
        if tokens > kv.blocks * kv.block_size:
            raise RefusedError(
                "invalid_argument",
                f"prompt and output need {tokens} tokens of KV cache, the pool has {kv.blocks * kv.block_size}; "
                "shorten the prompt, lower max_tokens, or raise kv.blocks",
            )
        needs = self._embedding_blocks(request)
        need = sum(needs) if self._core.config.scheduler.overlap == "none" else max(needs, default=0)
        if need > embedding.blocks:
            raise RefusedError(
                "invalid_argument",
                f"the images need {need * embedding.block_size} embedding rows at once, the pool has "
                f"{embedding.blocks * embedding.block_size}; send smaller images or raise embedding.blocks",
            )

    def fits_at_once(self, request: Request) -> bool:
        """True if the embedding pool holds all of a request's embeddings at the same time."""
        return sum(self._embedding_blocks(request)) <= self._core.config.embedding.blocks

    def reserve(self, sequence: Sequence, instance: Instance, now: float) -> bool:
        """Before a sequence that reserves takes anything at `instance`: all the blocks that it can need there.

        It may decode from them too, there or in another instance that has the same pool, or will when it joins.
        """
        if not sequence.reserves or sequence.table:
            return True
        pool = instance.kv
        assert pool
        others = self._core.doing("decode")
        decodes = not others or any(other.kv is pool for other in others)
        sequence.table = self.table_for(sequence, pool, decodes, now)
        return sequence.table is not None

    def reserve_output(self, sequence: Sequence, instance: Instance, now: float) -> bool:
        """Before a sequence decodes at `instance` from the blocks of its prefill: if it reserves, all that it can need.

        It has them unless only instances with other pools decoded when it started. False: they are not there now.
        """
        if not sequence.reserves:
            return True
        rest = sequence.most - sequence.scheduled
        return self.room_for(sequence, instance, rest, now) == rest

    def room_for(self, sequence: Sequence, instance: Instance, count: int, now: float) -> int:
        """Make room for the next `count` tokens at `instance`; return how many of them fit (0: wait)."""
        wanted = sequence.scheduled + count
        if sequence.table and sequence.table.held >= wanted:
            return count
        pool = instance.kv
        assert pool is not None
        if not self.reserve(sequence, instance, now):
            return 0
        table = sequence.table or Table(pool)
        if table.held >= wanted:
            return count
        if self._must_wait(pool.id, sequence):
            return max(0, table.held - sequence.scheduled)
        if sequence.table is None and not self._may_start(sequence, pool, sequence.known + 1, now):
            return 0
        if not table.grow(wanted):
            self._take_blocks(sequence, pool, pool.blocks_for(wanted) - len(table.blocks), now)
            count = min(count, table.capacity() - sequence.scheduled)
            if count <= 0:
                self._wait(pool.id, sequence)
                return 0
            table.grow(sequence.scheduled + count)
        sequence.table = table
        self._holders[pool.id][sequence.seq] = sequence
        return count

    def table_for(self, sequence: Sequence, pool: BlockPool, decodes: bool, now: float) -> Table | None:
        """A table of `pool` for all known tokens, or for all there will be if it reserves; None: wait."""
        tokens = sequence.most if sequence.reserves and decodes else sequence.known
        if self._must_wait(pool.id, sequence) or not self._may_start(sequence, pool, tokens, now):
            return None
        table = Table(pool)
        table.grow(tokens)
        self._holders[pool.id][sequence.seq] = sequence
        return table

    def embedding_for(
        self, sequence: Sequence, pool: EmbeddingPool, unit: Unit, now: float
    ) -> tuple[Embedding | None, bool]:
        """A unit's embedding, and whether it is there or on its way already; if not, it has blocks. None: wait."""
        if self._must_wait(pool.arena.id, sequence):
            return None, False
        key = (unit.item.key, unit.index)
        self._holders[pool.arena.id][sequence.seq] = sequence
        if cached := pool.find(key):
            if not cached.ready:
                cached.waiting.append(sequence)
            return cached, True
        embedding = pool.create(key, unit.rows)
        if embedding is None:
            need = pool.blocks_for(unit.rows)
            self._preempt(
                sequence,
                pool.arena.id,
                lambda: pool.available + pool.returning >= need,
                lambda victim: victim.lives_at is pool and victim.tracker.holds_any(),
                now,
            )
            embedding = pool.create(key, unit.rows)
        if embedding is None:
            self._wait(pool.arena.id, sequence)
        else:
            embedding.waiting.append(sequence)
        return embedding, False

    def _may_start(self, sequence: Sequence, pool: BlockPool, tokens: int, now: float) -> bool:
        need = pool.blocks_for(min(tokens, pool.size * pool.block_size))
        if pool.free < need and self._may_preempt(sequence):
            self._take_blocks(sequence, pool, need, now)
        if pool.free < need:
            self._wait(pool.id, sequence)
            return False
        return True

    def _take_blocks(self, sequence: Sequence, pool: BlockPool, need: int, now: float) -> None:
        """Preempt outranked sequences until `need` blocks are free or will be when plans in flight are done."""
        self._preempt(
            sequence,
            pool.id,
            lambda: pool.free + pool.returning >= need,
            lambda victim: any(table and table.pool is pool for table in (victim.table, victim.incoming)),
            now,
        )

    def _preempt(
        self,
        sequence: Sequence,
        pool_id: str,
        enough: Callable[[], bool],
        holds: Callable[[Sequence], bool],
        now: float,
    ) -> None:
        """Until there is enough, preempt those that hold some of a pool and that `sequence` outranks, last first."""
        if enough():
            return
        holders = self._holders[pool_id].values()
        victims = [s for s in holders if s.rank > sequence.rank and not s.protected and holds(s)]
        for victim in sorted(victims, key=lambda s: s.rank, reverse=True):
            self._core.life.preempt(victim, now)
            if enough():
                return

    def _may_preempt(self, sequence: Sequence) -> bool:
        """True for the first of all, and for those that reserve."""
        return sequence.reserves or all(s.rank >= sequence.rank for s in self._core.sequences.values())

    def _embedding_blocks(self, request: Request) -> list[int]:
        """Blocks of each distinct embedding of a request."""
        units = {(item.key, index): rows for item in request.items for index, rows in enumerate(item.units)}
        return [-(-rows // self._core.config.embedding.block_size) for rows in units.values()]

    def _must_wait(self, pool_id: str, sequence: Sequence) -> bool:
        for claims in (self._claims, self._waiting):
            claim = claims.get(pool_id)
            if claim is not None and claim.rank < sequence.rank and claim.stands:
                return True
        return False

    def _wait(self, pool_id: str, sequence: Sequence) -> None:
        claim = _Claim(sequence.rank, sequence, sequence.epoch)
        first = self._waiting.get(pool_id)
        if first is None or claim.rank < first.rank:
            self._waiting[pool_id] = claim
