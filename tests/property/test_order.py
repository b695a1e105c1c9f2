"""What the order policies promise, over random workloads. The bounds are derived in docs/scheduling.md."""

from __future__ import annotations

import random

import msgspec
from epd_scheduler.config import Config, EmbeddingConfig, KVConfig, RPSConfig, SchedulerConfig
from epd_scheduler.core import Core
from epd_scheduler.protocol import BatchPlan
from epd_scheduler.request import Request
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulated import Cluster, expected_tokens, make_request, worker_infos

BUDGET = 16
ORDERS = ["fcfs", "edf", "rps"]
common = settings(deadline=None, max_examples=100)


def ample(order: str, share: float = 0.0, delays: tuple[float, float] = (3.0, 8.0), stages: int = 1) -> Cluster:
    """Memory for everything, so that only the order decides."""
    config = Config(
        kv=KVConfig(block_size=4, blocks=4000),
        embedding=EmbeddingConfig(block_size=4, blocks=1000),
        scheduler=SchedulerConfig(
            order=order,  # type: ignore[arg-type]
            token_budget=BUDGET,
            encode_tokens=8,
            rps=RPSConfig("modality", *delays, share=share),
        ),
    )
    infos = worker_infos("e-p-d", 4000, 4, 1000, stages)
    return Cluster(Core(config, [info.name for info in infos]), infos, random.Random(0))


def text(seq: int, tokens: int, priority: int, slo: float = 1.0) -> Request:
    return msgspec.structs.replace(make_request(seq, [tokens], 1, []), priority=priority, slo=slo)


texts = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 3), st.floats(0.1, 9.0)), min_size=2, max_size=30)


@common
@given(texts, st.sampled_from(ORDERS), st.integers(0, 2**32))
def test_no_token_is_served_before_one_that_outranks_it(
    wanted: list[tuple[int, int, float]], order: str, seed: int
) -> None:
    """With RPS: a rock is behind all sand that came within its delay, and before all that came later (aging)."""
    cluster = ample(order)
    cluster.rng.seed(seed)
    for seq, (tokens, priority, slo) in enumerate(wanted, 1):
        cluster.add(text(seq, tokens, priority, slo))
        for _ in range(cluster.rng.randrange(3)):
            waiting = {s.seq: (s.rank, s.known) for s in cluster.core.order.for_prefill()}
            for plan in cluster.submit():
                if isinstance(plan, BatchPlan) and plan.instance == "prefill":
                    last = max(waiting[row.seq][0] for row in plan.rows)
                    for row in plan.rows:
                        if waiting[row.seq][0] < last:  # then it has been served whole
                            assert row.start + len(row.tokens) == waiting[row.seq][1]
                    served = {row.seq for row in plan.rows if row.sample}
                    waiting = {number: entry for number, entry in waiting.items() if number not in served}
                    assert all(rank >= last for rank, _ in waiting.values())
            cluster.advance()
    cluster.run()


@common
@given(st.integers(1, 200), st.sampled_from([2, 3]), st.sampled_from([0.1, 0.25, 0.5]), st.integers(1, BUDGET))
def test_under_endless_sand_a_pebble_or_rock_gets_its_share(
    tokens: int, priority: int, share: float, sand: int
) -> None:
    cluster = ample("rps", share, delays=(1e9, 1e9))  # it never outranks sand by age
    seq = 0
    while len(cluster.core.order) < 50:
        seq += 1
        cluster.add(text(seq, sand, 1))
    cluster.add(text(100_000, tokens, priority))
    served = 0
    while 100_000 not in cluster.ends:
        while len(cluster.core.order) < 50:
            seq += 1
            cluster.add(text(seq, sand, 1))
        served += sum(
            len(row.tokens)
            for plan in cluster.submit()
            if isinstance(plan, BatchPlan) and plan.instance == "prefill"
            for row in plan.rows
        )
        assert served <= -(-tokens // BUDGET) * BUDGET / share + 4 * BUDGET
        cluster.advance()


def test_whose_share_is_due_but_waits_for_memory_holds_up_nobody_that_outranks_it() -> None:
    """It would for ever, if another that it outranks held that memory: only the first of all preempts."""
    config = Config(
        kv=KVConfig(block_size=4, blocks=8),
        scheduler=SchedulerConfig(order="rps", token_budget=4, rps=RPSConfig("modality", share=1.0)),
    )
    infos = worker_infos("e-pd", 8, 4, 512, 1)
    cluster = Cluster(Core(config, [info.name for info in infos]), infos, random.Random(0))
    for seq, tokens, output, priority in ((7, 12, 8, 1), (8, 24, 1, 3), (9, 4, 2, 1)):  # 5, 7 and 2 blocks
        request = msgspec.structs.replace(text(seq, tokens, priority), max_tokens=output)
        assert len(expected_tokens(request)) == output
        cluster.add(request)
    cluster.run()
    assert list(cluster.ends) == [9, 7, 8]


parts = st.lists(
    st.one_of(st.integers(1, 30), st.lists(st.integers(1, 12), min_size=1, max_size=2).map(tuple)),
    min_size=1,
    max_size=5,
)


@common
@given(st.lists(parts, min_size=1, max_size=12), st.sampled_from(ORDERS), st.integers(1, 3), st.integers(0, 2**32))
def test_nothing_schedulable_is_left_while_a_worker_has_room(
    wanted: list[list[int | tuple[int, ...]]], order: str, stages: int, seed: int
) -> None:
    """No head-of-line blocking: who waits for its image holds up nobody else."""
    cluster = ample(order, stages=stages)
    cluster.rng.seed(seed)

    def check() -> None:
        cluster.submit()
        prefill, encoder = cluster.core.instances["prefill"], cluster.core.instances["encoder"]
        for sequence in cluster.core.order.for_prefill():
            if prefill.room:
                assert sequence.scheduled == min(sequence.tracker.ready, sequence.known) or (
                    sequence.reserves and sequence.tracker.needs_encoding()
                )
            if encoder.room:
                assert not sequence.tracker.needs_encoding()

    for seq, some in enumerate(wanted, 1):
        media = [seq * 10 + index for index in range(len(some))]
        cluster.add(make_request(seq, some, 3, media))
        for _ in range(cluster.rng.randrange(4)):
            check()
            cluster.advance()
    while cluster.core.sequences:
        check()
        assert cluster.advance()
