"""The queue of each class: its depth, its oldest request, waits, tokens."""

import random

import pytest
from epd_scheduler.config import Config, EmbeddingConfig, KVConfig, RPSConfig, SchedulerConfig
from epd_scheduler.core import Core

from tests.simulated import Cluster, make_request, worker_infos


@pytest.mark.parametrize("order", ["fcfs", "edf", "rps"])
def test_each_class_has_its_numbers_under_every_order(order: str) -> None:
    """Arrivals at 1, 2, 3 and 4 s: a text, one image, two times two images; the core looks at them from 10 s on."""
    scheduler = SchedulerConfig(order=order, token_budget=64, rps=RPSConfig("modality"))  # type: ignore[arg-type]
    config = Config(
        kv=KVConfig(block_size=4, blocks=64), embedding=EmbeddingConfig(block_size=4, blocks=64), scheduler=scheduler
    )
    infos = worker_infos("e-pd", 64, 4, 64, 1)
    cluster = Cluster(Core(config, [info.name for info in infos]), infos, random.Random(0))
    cluster.now = 10.0
    for seq, parts in enumerate(([9], [3, (8,)], [(8,), (8,)], [5, (8,), (8,)]), 1):
        cluster.add(make_request(seq, parts, 3, [10 * seq, 10 * seq + 1]))
    before = cluster.core.stats()
    assert before.waiting == {"sand": 1, "pebble": 1, "rock": 2}
    assert before.oldest == {"sand": 1.0, "pebble": 2.0, "rock": 3.0}
    assert not before.waits

    cluster.submit()  # at 10.001 s: a batch with all text that comes first in a prompt, two encodings
    first = cluster.core.stats()
    assert sorted(first.waits) == [
        ("pebble", pytest.approx(8.001)),
        ("rock", pytest.approx(6.001)),
        ("rock", pytest.approx(7.001)),
        ("sand", pytest.approx(9.001)),
    ]
    assert first.waiting == {"pebble": 1, "rock": 2}

    cluster.run()
    after = cluster.core.stats()
    assert (after.waiting, after.oldest, list(after.waits)) == ({}, {}, [])
    assert after.prefilled == {"sand": 9, "pebble": 11, "rock": 16 + 21}
    assert after.prefilled_tokens == 57


def test_what_is_recomputed_counts_as_prefilled_even_token_by_token() -> None:
    """The step that computes the second generated token fails: prompt and both are computed again, one at a time."""
    config = Config(
        kv=KVConfig(4, 64),
        embedding=EmbeddingConfig(4, 64),
        scheduler=SchedulerConfig(token_budget=1, async_scheduling=False),
    )
    infos = worker_infos("e-pd", 64, 4, 64, 1)
    cluster = Cluster(Core(config, [info.name for info in infos]), infos, random.Random(0))
    cluster.add(make_request(1, [2], 3, []))
    while len(cluster.tokens[1]) < 2:
        cluster.submit()
        cluster.advance()
    cluster.workers["language"].fail_next = True
    cluster.run()
    assert len(cluster.tokens[1]) == 3
    stats = cluster.core.stats()
    assert (stats.prefilled_tokens, stats.decoded_tokens) == (2 + 4, 1)
