"""What holds for every simulated workload."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from epd_scheduler.config import Config, EmbeddingConfig, KVConfig, RPSConfig, SchedulerConfig
from epd_scheduler.profile import EncodeCost, ForwardCost, MigrateCost, Profile
from epd_scheduler.simulation.devices import Timing
from epd_scheduler.simulation.engine import Run, Simulation
from epd_scheduler.simulation.images import Grid, Tiles
from epd_scheduler.simulation.topology import topology
from epd_scheduler.workload import Kind, Mix, RequestSpec, generate

MIX = Mix(
    "mixed",
    (
        Kind(name="text", share=0.6, text_tokens=(10, 200), output_tokens=(1, 20)),
        Kind(name="video", share=0.4, text_tokens=(10, 20), output_tokens=(1, 20), images=(1, 8), sizes=((448, 448),)),
    ),
)
PROFILE = Profile(
    "m",
    "d",
    EncodeCost(overhead=1e-3, per_row=2e-5),
    ForwardCost(overhead=1e-3, floor=5e-3, per_token=4e-5, per_context=1e-7),
    kv_bytes_token=1000,
    embedding_bytes_row=100,
    migrate=MigrateCost(1e-4, 1e-5),
)


def simulate(instances: str, *, order: str = "fcfs", kv_blocks: int = 400, stages: int = 1, count: int = 150) -> Run:
    config = Config(
        kv=KVConfig(blocks=kv_blocks),
        embedding=EmbeddingConfig(blocks=200),
        scheduler=SchedulerConfig(order=order, rps=RPSConfig(classifier="modality")),  # type: ignore[arg-type]
    )
    timing = Timing(intake_s=1e-3, exchange_s=2e-4, response_s=1e-4, hop_s=1e-4, embedding_bytes_s=1e9)
    simulation = Simulation(
        config, topology(instances, stages=stages), PROFILE, vision=Grid(), timing=timing, record=True
    )
    return simulation.run(generate(MIX, rate=10, count=count))


@pytest.mark.parametrize("order", ["fcfs", "edf", "rps"])
@pytest.mark.parametrize(("instances", "stages"), [("1EPD", 1), ("2E1PD", 4), ("2EP2D", 1), ("3E2P2D", 2)])
def test_every_request_gets_all_its_tokens(instances: str, stages: int, order: str) -> None:
    run = simulate(instances, stages=stages, order=order)
    wanted = [spec.output_tokens for spec in generate(MIX, rate=10, count=150)]
    assert [result.output_tokens for result in run.results] == wanted
    assert [len(run.token_times[index]) for index in range(150)] == wanted
    assert all(result.ok and result.arrival < result.ttft_s + result.arrival <= result.end for result in run.results)
    assert run.stats.kv_blocks_used == run.stats.embedding_blocks_used == run.stats.in_flight == 0


def test_no_stage_does_two_things_at_once() -> None:
    lanes: dict[tuple[str, int], float] = {}
    for busy in simulate("2E2P2D", stages=2).busy:
        assert busy.start >= lanes.get((busy.instance, busy.stage), 0.0)
        lanes[busy.instance, busy.stage] = busy.end


def test_work_is_conserved() -> None:
    """Without preemption every row is encoded once and every token computed once."""
    run = simulate("2E1PD", kv_blocks=4000)
    specs = generate(MIX, rate=10, count=150)
    assert sum(run.stats.preemptions.values()) == 0
    assert sum(b.amount for b in run.busy if b.what == "encode") == 256 * sum(len(spec.images) for spec in specs)
    prompt, output = sum(run.prompt_tokens), sum(spec.output_tokens for spec in specs)
    assert sum(b.amount for b in run.busy if b.what == "forward") == prompt + output - len(specs)


def test_scarce_memory_preempts_and_loses_nothing() -> None:
    run = simulate("1E1PD", order="rps", kv_blocks=140)
    assert run.stats.preemptions.keys() == {"rock"}
    assert sum(result.preemptions for result in run.results) == sum(run.stats.preemptions.values())
    assert sum(result.preempted_s for result in run.results) > 0
    assert all(result.ok for result in run.results)


def test_the_same_workload_gives_the_same_run() -> None:
    first, second = simulate("2E1P1D", order="rps"), simulate("2E1P1D", order="rps")
    assert first.results == second.results
    assert first.busy == second.busy
    assert asdict(first.stats) == asdict(second.stats)


def test_what_can_never_be_served_is_refused_and_says_so() -> None:
    specs = [RequestSpec(at=0, kind="text", text_tokens=7000, output_tokens=1)]
    config = Config(kv=KVConfig(blocks=400), embedding=EmbeddingConfig(blocks=200))
    run = Simulation(config, topology("1EPD"), PROFILE, vision=Grid()).run(specs)
    assert "raise kv.blocks" in run.results[0].error


def test_an_open_queue_behaves_as_queueing_theory_says() -> None:
    """M/D/1: requests of 20 ms, one at a time, half the time busy: the mean wait is rho / (2 (1 - rho)) services."""
    mix = Mix("one", (Kind(name="text", share=1, text_tokens=(10, 10), output_tokens=(1, 1)),))
    profile = Profile("m", "d", EncodeCost(), ForwardCost(overhead=0.02), kv_bytes_token=1, embedding_bytes_row=1)
    config = Config(scheduler=SchedulerConfig(max_rows=1))
    run = Simulation(config, topology("1EPD"), profile, vision=Grid()).run(generate(mix, rate=25, count=8000))
    mean = sum(result.ttft_s for result in run.results) / len(run.results)
    assert mean == pytest.approx(0.02 * (1 + 0.5 / (2 * 0.5)), rel=0.06)


@pytest.mark.parametrize(
    ("vision", "size", "units"),
    [
        (Grid(), (448, 448), (256,)),
        (Grid(), (1024, 1024), (37 * 37,)),
        (Grid(most=1280), (1920, 1080), (47 * 26,)),  # transformers' smart_resize: 1316 x 728
        (Tiles(rows=64, most=9), (4032, 3024), (64,) * 10),
        (Tiles(rows=256, most=12), (4032, 3024), (256,) * 13),
        (Tiles(rows=256, most=12), (448, 448), (256,)),
        (Tiles(rows=256, most=12), (896, 448), (256,) * 3),
    ],
)
def test_units_of_an_image(vision: Grid | Tiles, size: tuple[int, int], units: tuple[int, ...]) -> None:
    assert vision.units(*size) == units
