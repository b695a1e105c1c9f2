"""Literal times: a millisecond a token, in the encoder and in prefill; batches of 8 tokens, chunks of 16 at most."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from epd_scheduler.config import Config, EmbeddingConfig, KVConfig, SchedulerConfig
from epd_scheduler.impact import ImpactEstimator
from epd_scheduler.profile import EncodeCost, ForwardCost, Profile, load_profile
from epd_scheduler.simulation.engine import Simulation
from epd_scheduler.simulation.images import Grid
from epd_scheduler.simulation.topology import topology
from epd_scheduler.workload import RequestSpec

from tests.simulated import make_request

ROOT = Path(__file__).parents[2]
PROFILE = Profile(
    model="example",
    device="example",
    encode=EncodeCost(per_row=1e-3),
    forward=ForwardCost(per_token=1e-3),
    kv_bytes_token=100,
    embedding_bytes_row=10,
)


def milliseconds(parts: list, overlap: str = "full", apart: bool = True, **scheduler: int) -> float:
    config = SchedulerConfig(overlap=overlap, **{"encode_tokens": 8, "token_budget": 16, **scheduler})  # type: ignore[arg-type]
    request = make_request(1, parts, 4, list(range(len(parts))))
    return 1e3 * ImpactEstimator(PROFILE, config).estimate_request(request, apart=apart).prefill_s


@pytest.mark.parametrize(
    ("parts", "none", "full"),
    [
        ([24], 24, 24),
        ([4, (8,), 4, (8,)], 40, 28),  # RServe's figure 9, case 0: 0-4, from 8 on 4-16, from 20 on 16-24
        ([4, (8,), (8,), 4], 40, 28),  # case 1: 0-4, from 8 on 4-12, from 16 on 12-24
        ([(8,), (8,), 8], 40, 32),  # from 8 on 0-8, from 16 on 8-24
        ([(8, 8), 8], 40, 32),  # units of one item
        ([(4,), (4,), (2,)], 20, 18),  # a batch of two, done at 8, and the rest, done at 10: 0-8, from 16 on 8-10
    ],
)
def test_a_chunk_waits_for_the_encodings_that_it_needs(parts: list, none: float, full: float) -> None:
    assert milliseconds(parts, "none") == pytest.approx(none)
    assert milliseconds(parts, "full") == pytest.approx(full)
    assert milliseconds(parts, "intra") == pytest.approx(full)
    assert milliseconds(parts, "full", apart=False) == pytest.approx(none)


@pytest.mark.parametrize(("async_scheduling", "expected"), [(True, 35), (False, 34)])
def test_a_chunk_is_put_together_when_the_window_has_room(async_scheduling: bool, expected: float) -> None:
    """A forward costs 1 ms besides; the image is encoded at 8. Two plans in flight: 0-16 and 16-20 at once, 20-32 when
    the first is done. One: 0-16, then 16-32."""
    profile = msgspec.structs.replace(PROFILE, forward=ForwardCost(overhead=1e-3, per_token=1e-3))
    config = SchedulerConfig(encode_tokens=8, token_budget=16, async_scheduling=async_scheduling)
    impact = ImpactEstimator(profile, config).estimate_request(make_request(1, [20, (8,), 4], 4, [0, 1, 2]))
    assert 1e3 * impact.prefill_s == pytest.approx(expected)


def test_kv_bytes_are_those_of_prompt_and_output() -> None:
    impact = ImpactEstimator(PROFILE, SchedulerConfig()).estimate(20, 4, (8,))
    assert impact.kv_bytes == 2400


@pytest.mark.parametrize("overlap", ["none", "intra", "full"])
@pytest.mark.parametrize("images", [0, 1, 4, 16])
@pytest.mark.parametrize("size", [(448, 448), (1024, 1024)])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_the_estimate_is_what_the_core_takes_alone(
    overlap: str, images: int, size: tuple[int, int], async_scheduling: bool
) -> None:
    """With workers as fast as the cost model says, and nothing besides."""
    profile = load_profile(ROOT / "deploy/profiles/qwen2.5-vl-7b-h100.yaml")
    scheduler = SchedulerConfig(overlap=overlap, async_scheduling=async_scheduling)  # type: ignore[arg-type]
    spec = RequestSpec(at=0.0, kind="x", text_tokens=700, output_tokens=1, images=(size,) * images)
    config = Config(kv=KVConfig(blocks=4096), embedding=EmbeddingConfig(blocks=4096), scheduler=scheduler)
    (seen,) = Simulation(config, topology("1E1PD"), profile, vision=Grid()).run([spec]).results
    rows = [rows for each in spec.images for rows in Grid().units(*each)]
    estimated = ImpactEstimator(profile, scheduler).estimate(700 + sum(rows), 1, rows)
    assert seen.ttft_s == pytest.approx(estimated.prefill_s)
