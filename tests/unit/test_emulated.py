"""An emulated worker: the cost model's times through its stages, the protocol of a real one."""

from __future__ import annotations

import os
import threading
import time

import pytest
from epd_backend.doorbell import ring
from epd_backend.emulated import EmulatedWorker
from epd_scheduler.config import Config, EmbeddingConfig, KVConfig
from epd_scheduler.profile import EncodeCost, ForwardCost, MigrateCost, Profile
from epd_scheduler.protocol import (
    ArenaInfo,
    BatchPlan,
    EncodePlan,
    EncodeUnit,
    Exchange,
    MigratePlan,
    Outcome,
    Plan,
    Reply,
    Row,
    Sample,
    decode_reply,
    encode,
)

PROFILE = Profile(
    "m",
    "d",
    EncodeCost(per_row=0.01),
    ForwardCost(per_token=0.05, per_context=0.001),
    kv_bytes_token=1,
    embedding_bytes_row=1,
    migrate=MigrateCost(overhead=0.02, per_block=0.04),
)
CONFIG = Config(kv=KVConfig(block_size=16, blocks=8), embedding=EmbeddingConfig(block_size=4, blocks=6))
ARENA = ArenaInfo("emulated-embedding-cpu:0", "embedding", "cpu:0", "", (6, 4, 1), "float32")


def worker(*, stages: int = 1) -> EmulatedWorker:
    return EmulatedWorker(CONFIG, PROFILE, name="w", roles=("prefill", "decode"), device="cpu:0", stages=stages)


def forward(plan: int, tokens: int, *, start: int = 0, sample: bool = True) -> BatchPlan:
    named = (5,) * tokens if tokens > 1 else ()  # one: the token sampled last
    return BatchPlan(plan, "w", (Row(plan, start, named, b"", (0,), sample=sample),))


def images(plan: int, *rows: int) -> EncodePlan:
    return EncodePlan(
        plan, "w", ARENA, tuple(EncodeUnit(1, item, 0, 0, count, (0,)) for item, count in enumerate(rows))
    )


def exchange(made: EmulatedWorker, *plans: Plan, wait_s: float = 0.0, hello: bool = False) -> Reply:
    return decode_reply(made.exchange(encode(Exchange(plans, wait_s=wait_s, hello=hello)), memoryview(b"")))


@pytest.mark.parametrize("same", [True, False], ids=["this process", "its predecessor"])
def test_plans_for_another_process_are_not_taken(same: bool) -> None:
    made = worker()
    message = Exchange((forward(1, 100),), pid=os.getpid() if same else os.getpid() + 1)
    assert decode_reply(made.exchange(encode(message), memoryview(b""))).pending == int(same)
    made.close()


def run(made: EmulatedWorker, *plans: Plan) -> list[Outcome]:
    outcomes = list(exchange(made, *plans, wait_s=60.0).outcomes)
    while len(outcomes) < len(plans):
        reply = exchange(made, wait_s=60.0)
        assert reply.outcomes, "no outcome within a minute"
        outcomes += reply.outcomes
    assert time.monotonic() >= outcomes[-1].end
    return outcomes


def spans(outcomes: list[Outcome]) -> list[tuple[float, float]]:
    """(start, end) of each, from the start of the first."""
    return [(outcome.start - outcomes[0].start, outcome.end - outcomes[0].start) for outcome in outcomes]


def near(*pairs: tuple[float, float]) -> list[object]:
    return [pytest.approx(pair) for pair in pairs]


def test_it_says_that_it_is_emulated_and_what_memory_it_would_have() -> None:
    info = exchange(worker(), hello=True).info
    assert info is not None
    assert (info.name, info.emulated, info.weight_bytes) == ("w", True, 0)
    assert [arena.shape for arena in info.kv] == [(8, 1, 2, 16, 1, 1)]
    assert info.embedding == ARENA


def test_plans_take_the_time_of_the_cost_model_one_after_the_other() -> None:
    migration = MigratePlan(4, "w", 1, (), (0, 1), (0, 1))
    outcomes = run(worker(), forward(1, 4), images(2, 3, 2), forward(3, 1, start=9), migration)
    assert [outcome.plan for outcome in outcomes] == [1, 2, 3, 4]
    assert spans(outcomes) == near((0, 0.2), (0.2, 0.25), (0.25, 0.31), (0.31, 0.41))


def test_stages_share_a_forward_and_an_encoding_is_all_in_the_first() -> None:
    """The encoding runs in the first stage from 0.1 to 0.15, when the last forward enters it, and comes out first."""
    outcomes = run(worker(stages=2), forward(1, 4), images(2, 5), forward(3, 4))
    assert [outcome.plan for outcome in outcomes] == [2, 1, 3]
    assert spans(outcomes) == near((0, 0.05), (-0.1, 0.1), (0.05, 0.25))


def test_a_row_that_samples_gets_a_token() -> None:
    first, second = run(worker(), forward(1, 2), forward(2, 2, sample=False))
    assert (first.samples, second.samples) == ((Sample(1, 65),), ())


def test_an_exchange_waits_no_longer_than_asked() -> None:
    made = worker()
    reply = exchange(made, forward(1, 1000), wait_s=0.01)  # 50 s
    assert (reply.outcomes, reply.pending) == ((), 1)


@pytest.mark.parametrize("early", [True, False], ids=["while the call is on its way", "while it waits"])
def test_a_ring_ends_the_wait(early: bool) -> None:
    made = worker()
    if early:
        ring(made.info.bell)
    else:
        threading.Timer(0.1, ring, [made.info.bell]).start()
    reply = exchange(made, forward(1, 1000), wait_s=60.0)
    assert (reply.outcomes, reply.pending) == ((), 1)
