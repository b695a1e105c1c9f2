"""Random requests, topologies, timings, cancellations and deaths: every request ends, with the right tokens."""

from __future__ import annotations

import random

import msgspec
import pytest
from epd_scheduler.config import Config, EmbeddingConfig, KVConfig, RPSConfig, SchedulerConfig
from epd_scheduler.core import Core
from epd_scheduler.protocol import EncodePlan
from epd_scheduler.request import RefusedError, Request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.simulated import Cluster, expected_tokens, make_request, worker_infos

TOPOLOGIES = ["e-p-d", "2e-p-d", "e-2p-2d", "e-pd", "e-p+d", "e-p+d-d", "epd"]

part = st.one_of(st.integers(1, 30), st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple))
prompt = st.lists(part, min_size=1, max_size=6)


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    made = []
    for seq, parts in enumerate(draw(st.lists(prompt, min_size=1, max_size=12)), 1):
        media = [draw(st.integers(1, 6)) * 100 + _shape_number(p) for p in parts if isinstance(p, tuple)]
        request = make_request(seq, parts, draw(st.integers(1, 12)), media)
        made.append(msgspec.structs.replace(request, priority=draw(st.sampled_from([0, 1]))))  # sand with images too
    return made


def _shape_number(units: tuple[int, ...]) -> int:
    """Equal media have equal units, as one image has one size."""
    return hash(units) % 10_000 * 1_000


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[Config, list[Request]]:
    """Requests and pools that are barely large enough, or not much larger."""
    wanted = draw(requests())
    block_size = draw(st.sampled_from([1, 4, 16]))
    overlap = draw(st.sampled_from(["none", "intra", "full"]))
    kv_need = max(-(-(len(r.tokens) + r.max_tokens) // block_size) for r in wanted)
    embedding_need = 1
    for request in wanted:
        units = {(i.key, n): -(-rows // 4) for i in request.items for n, rows in enumerate(i.units)}
        need = sum(units.values()) if overlap == "none" else max(units.values(), default=1)
        embedding_need = max(embedding_need, need)
    config = Config(
        kv=KVConfig(block_size=block_size, blocks=kv_need + draw(st.integers(0, kv_need))),
        embedding=EmbeddingConfig(block_size=4, blocks=embedding_need + draw(st.integers(0, 8))),
        scheduler=SchedulerConfig(
            overlap=overlap,
            order=draw(st.sampled_from(["fcfs", "edf", "rps"])),
            rps=RPSConfig("modality", draw(st.sampled_from([0.0, 5.0])), 10.0, draw(st.sampled_from([0.0, 0.3]))),
            encode_tokens=draw(st.sampled_from([1, 8, 64])),
            token_budget=draw(st.sampled_from([1, 7, 32, 512])),
            max_rows=draw(st.sampled_from([1, 3, 64])),
            async_scheduling=draw(st.booleans()),
        ),
    )
    return config, wanted


def make_cluster(config: Config, topology: str, stages: int, seed: int) -> Cluster:
    infos = worker_infos(topology, config.kv.blocks, config.kv.block_size, config.embedding.blocks, stages)
    core = Core(config, [info.name for info in infos])
    return Cluster(core, infos, random.Random(seed))


common = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


@common
@given(scenarios(), st.sampled_from(TOPOLOGIES), st.integers(1, 3), st.integers(0, 2**32))
def test_every_request_ends_with_the_right_tokens(
    scenario: tuple[Config, list[Request]], topology: str, stages: int, seed: int
) -> None:
    config, wanted = scenario
    cluster = make_cluster(config, topology, stages, seed)
    for request in wanted:
        cluster.add(request)
        for _ in range(cluster.rng.randrange(4)):
            cluster.submit()
            cluster.advance()
    cluster.run()
    for request in wanted:
        tokens = expected_tokens(request)
        assert cluster.tokens[request.seq] == tokens
        assert cluster.ends[request.seq].reason == ("length" if len(tokens) == request.max_tokens else "stop")
    cluster.assert_empty()
    if config.scheduler.order == "rps":
        assert "sand" not in cluster.core.stats().preemptions


@common
@given(scenarios(), st.sampled_from(TOPOLOGIES), st.integers(1, 3), st.integers(0, 2**32))
def test_chaos_harms_nobody_else(scenario: tuple[Config, list[Request]], topology: str, stages: int, seed: int) -> None:
    """Cancellations, bad media, failing plans, deaths and returns of instances at random moments."""
    config, wanted = scenario
    cluster = make_cluster(config, topology, stages, seed)
    rng = cluster.rng
    cluster.bad_media.update({item.media for request in wanted for item in request.items if rng.random() < 0.1})
    touched: set[int] = set()
    for request in wanted:
        try:
            cluster.add(request)
        except RefusedError as refusal:
            assert refusal.reason == "unavailable"  # noqa: PT017
            touched.add(request.seq)
            continue
        for _ in range(rng.randrange(12)):
            _disturb(cluster, touched, topology, stages)
            cluster.submit()
            cluster.advance()
    cluster.run()
    for request in wanted:
        bad = cluster.bad_media & {item.media for item in request.items}
        if request.seq not in cluster.ends:
            assert request.seq in touched
            continue
        end = cluster.ends[request.seq]
        tokens = cluster.tokens[request.seq]
        expected = expected_tokens(request)
        assert tokens == expected[: len(tokens)]
        if end.reason in ("stop", "length") and request.seq not in touched:
            assert tokens == expected
        else:
            if end.reason == "invalid_argument":
                index = int(end.message.removeprefix("image ").partition(":")[0])
                assert request.items[index].media in bad
            assert end.reason != "cancelled" or request.seq in touched
    cluster.assert_empty()


def test_blocks_that_an_encoder_still_writes_are_not_handed_out_when_their_instance_returns() -> None:
    config = Config(kv=KVConfig(4, 64), embedding=EmbeddingConfig(4, 8), scheduler=SchedulerConfig(encode_tokens=8))
    cluster = make_cluster(config, "2e-p-d", 1, 0)
    named: list[int] = []
    for seq in (1, 2):
        cluster.add(request := make_request(seq, [4, (8,)], 2, [seq]))
        plans = [plan for plan in cluster.submit() if isinstance(plan, EncodePlan)]
        named += [block for plan in plans for unit in plan.units for block in unit.blocks]
        if seq == 1:
            info = cluster.workers["prefill"].info
            cluster.lose("prefill")
            cluster.join(info)
    assert len(named) == len(set(named)) == 4
    cluster.run()
    assert cluster.ends[1].reason == "unavailable"
    assert cluster.tokens[2] == expected_tokens(request)
    cluster.assert_empty()


@pytest.mark.parametrize("at_first", ["decode", "nobody", "elsewhere"])
def test_sand_that_prefills_and_decodes_in_one_pool_reserves_for_both(at_first: str) -> None:
    """Else two that are never preempted each wait for the other's blocks. `at_first` decodes; the others join later."""
    config = Config(
        kv=KVConfig(4, 8),
        embedding=EmbeddingConfig(4, 8),
        scheduler=SchedulerConfig(order="rps", rps=RPSConfig("modality")),
    )
    *others, decode = worker_infos("e-p+d", 8, 4, 8, 1)
    cluster = Cluster(Core(config, ["encoder", "prefill", "decode"]), others, random.Random(0))
    elsewhere = msgspec.structs.replace(worker_infos("e-p-d", 8, 4, 8, 1)[-1], name="elsewhere")
    if at_first != "nobody":
        cluster.join(decode if at_first == "decode" else elsewhere)
    wanted = [make_request(seq, [12], 12, []) for seq in (6, 7)]
    assert [len(expected_tokens(request)) for request in wanted] == [12, 12]
    for request in wanted:
        cluster.add(request)
    cluster.submit()
    while cluster.advance():
        pass
    if at_first != "decode":
        cluster.join(decode)
    if at_first == "elsewhere":
        assert len(cluster.core.handover) == 2
        cluster.lose("elsewhere")
    cluster.run()
    assert [cluster.tokens[request.seq] for request in wanted] == [expected_tokens(request) for request in wanted]
    cluster.assert_empty()


def test_a_refusal_names_the_lost_instances_of_the_stage() -> None:
    cluster = make_cluster(Config(), "e-2p-2d", 1, 0)
    for name in ("encoder", "prefill_1", "prefill"):
        cluster.lose(name)
    with pytest.raises(
        RefusedError,
        match=r"stage 'prefill' \(lost: prefill, prefill_1\); bring it back with "
        "`epd reload prefill` or `epd reload prefill_1`",
    ):
        cluster.core.add(make_request(1, [4], 2, []), 0.0)


def test_blocks_that_a_lost_instance_may_still_write_are_kept_until_it_is_idle_or_gone() -> None:
    config = Config(kv=KVConfig(4, 64), embedding=EmbeddingConfig(4, 4), scheduler=SchedulerConfig(encode_tokens=8))
    cluster = make_cluster(config, "2e-p-d", 1, 0)
    cluster.add(make_request(1, [4, (8,)], 2, [1]))

    def encoding() -> list[tuple[str, list[int]]]:
        plans = [plan for plan in cluster.submit() if isinstance(plan, EncodePlan)]
        return [(plan.instance, [block for unit in plan.units for block in unit.blocks]) for plan in plans]

    ((first, blocks),) = encoding()
    assert len(blocks) == 2
    cluster.core.lose(first, cluster.now)
    lost = cluster.workers.pop(first)
    ((second, others),) = encoding()
    assert second != first
    assert len({*blocks, *others}) == 4
    cluster.core.lose(second, cluster.now)
    assert cluster.core.stats().embedding_blocks_used == 4
    cluster.core.reclaim(lost.info.pid)
    assert cluster.core.stats().embedding_blocks_used == 2
    cluster.join(lost.info)
    cluster.core.reclaim(cluster.workers.pop(second).info.pid)
    cluster.run()
    assert cluster.ends[1].reason == "unavailable"
    cluster.assert_empty()


def _disturb(cluster: Cluster, touched: set[int], topology: str, stages: int) -> None:
    rng, config = cluster.rng, cluster.core.config
    dice = rng.random()
    if not cluster.workers:
        return
    if dice < 0.05 and cluster.core.sequences:
        seq = rng.choice(list(cluster.core.sequences))
        touched.add(seq)
        (cluster.core.cancel if rng.random() < 0.5 else cluster.core.stop)(seq, cluster.now)
    elif dice < 0.08:
        rng.choice(list(cluster.workers.values())).fail_next = True
    elif dice < 0.12:
        name = rng.choice(list(cluster.workers))
        undead = rng.random() < 0.5
        cluster.lose(name, undead)
        # An arena that other instances have mapped outlives its maker, and the next one finds it.
        generation = f"#{rng.randrange(10**9)}" if rng.random() < 0.5 else ""
        infos = worker_infos(
            topology, config.kv.blocks, config.kv.block_size, config.embedding.blocks, stages, generation
        )
        info = next(info for info in infos if info.name == name)
        if undead and rng.random() < 0.5:
            cluster.returning[name] = info
        else:
            cluster.join(info)
