"""Schedules small enough to be worked out by hand. Every cost is one second a token or a row unless said otherwise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from types import MappingProxyType

import pytest
from epd_scheduler.config import Config, EmbeddingConfig, KVConfig, SchedulerConfig
from epd_scheduler.metrics_summary import SLO
from epd_scheduler.profile import EncodeCost, ForwardCost, MigrateCost, Profile
from epd_scheduler.simulation.devices import Timing
from epd_scheduler.simulation.engine import Run, Simulation
from epd_scheduler.simulation.images import Grid
from epd_scheduler.simulation.requests import Template, make_request
from epd_scheduler.simulation.topology import InstanceSpec, TopologyError, topology
from epd_scheduler.workload import RequestSpec

SECOND = Profile(
    "hand",
    "hand",
    EncodeCost(per_row=1.0),
    ForwardCost(per_token=1.0),
    kv_bytes_token=1,
    embedding_bytes_row=1,
    migrate=MigrateCost(per_block=0.5),
)
TWO_ROWS = (28, 56)  # an image of 1 x 2 squares: with `least` 1, two embedding rows


def simulate(
    specs: list[RequestSpec],
    instances: str | tuple[InstanceSpec, ...],
    *,
    stages: int = 1,
    timing: Timing | None = None,
    template: Template | None = None,
    budget: int = 4,
    overlap: str = "full",
    order: str = "fcfs",
    slos: Mapping[str, SLO] = MappingProxyType({}),
) -> Run:
    config = Config(
        kv=KVConfig(block_size=4, blocks=100),
        embedding=EmbeddingConfig(block_size=2, blocks=100),
        scheduler=SchedulerConfig(order, overlap, encode_tokens=2, token_budget=budget, max_rows=8),  # type: ignore[arg-type]
    )
    specs_of = topology(instances, stages=stages) if isinstance(instances, str) else instances
    simulation = Simulation(
        config, specs_of, SECOND, vision=Grid(least=1), timing=timing, template=template, record=True
    )
    return simulation.run(specs, slos)


def text(at: float, tokens: int, output: int = 1) -> RequestSpec:
    return RequestSpec(at=at, kind="text", text_tokens=tokens, output_tokens=output)


def pictures(at: float, images: int, text_tokens: int, output: int = 1) -> RequestSpec:
    return RequestSpec(at=at, kind="image", text_tokens=text_tokens, output_tokens=output, images=(TWO_ROWS,) * images)


def work(run: Run, *whats: str) -> list[tuple[str, int, str, float, float]]:
    return [(b.instance, b.stage, b.what, b.start, b.end) for b in run.busy if not whats or b.what in whats]


def test_a_prompt_runs_in_chunks_of_the_budget_then_decodes() -> None:
    run = simulate([text(0, 6, output=3)], "1EPD")
    assert work(run) == [
        ("EPD0", 0, "forward", 0, 4),
        ("EPD0", 0, "forward", 4, 6),
        ("EPD0", 0, "forward", 6, 7),
        ("EPD0", 0, "forward", 7, 8),
    ]
    assert run.token_times[0] == [6, 7, 8]
    assert (run.results[0].ttft_s, run.results[0].tpot_s, run.results[0].e2e_s) == (6, 1, 8)


def test_stages_of_a_pipeline_overlap_chunks() -> None:
    """Chunked pipeline parallelism: two chunks of 4 tokens in two stages take 2 s a stage; a hop costs 0.5 s."""
    run = simulate([text(0, 8)], "1EPD", stages=2, timing=Timing(hop_s=0.5))
    assert work(run) == [
        ("EPD0", 0, "forward", 0, 2),
        ("EPD0", 1, "forward", 2.5, 4.5),
        ("EPD0", 0, "forward", 2, 4),
        ("EPD0", 1, "forward", 4.5, 6.5),
    ]
    assert run.results[0].ttft_s == 6.5


@pytest.mark.parametrize(("overlap", "first_token"), [("full", 7), ("none", 9)])
def test_prefill_overlaps_the_encoding_of_the_next_image(overlap: str, first_token: float) -> None:
    """RServe's figure 9, case 1: two images in a row, one encoder. Encoding 0-2 and 2-4, then 5 tokens of prefill.

    With overlap the first image's two tokens are prefilled while the second image is encoded.
    """
    run = simulate([pictures(0, 2, 1)], "1E1PD", overlap=overlap)
    assert work(run, "encode") == [("E0", 0, "encode", 0, 2), ("E0", 0, "encode", 2, 4)]
    assert run.results[0].ttft_s == first_token


def test_images_of_a_request_spread_over_encoders() -> None:
    """EPD's intra-request parallelism: three images on three encoders are encoded in the time of one."""
    run = simulate([pictures(0, 3, 1)], "3E1PD", overlap="none")
    assert work(run, "encode") == [(f"E{i}", 0, "encode", 0, 2) for i in range(3)]
    assert run.results[0].ttft_s == 2 + 7


def test_encoding_on_the_language_instance_blocks_its_forward() -> None:
    """The monolithic baseline: the text that came just after an image waits for its encoding."""
    run = simulate([pictures(0, 1, 1), text(0.5, 1)], "1EPD")
    assert work(run)[:2] == [("EPD0", 0, "encode", 0, 2), ("EPD0", 0, "forward", 2, 3)]
    assert run.results[1].ttft_s == 2.5
    assert simulate([pictures(0, 1, 1), text(0.5, 1)], "1E1PD").results[1].ttft_s == 1


def test_encoding_on_the_language_instance_alternates_with_its_forward() -> None:
    """A text does not wait until all images of the request before it are encoded: at most for one batch of them."""
    run = simulate([pictures(0, 3, 1), text(0.5, 1)], "1EPD", overlap="none")
    assert work(run) == [
        ("EPD0", 0, "encode", 0, 2),
        ("EPD0", 0, "forward", 2, 3),
        ("EPD0", 0, "encode", 3, 5),
        ("EPD0", 0, "encode", 5, 7),
        ("EPD0", 0, "forward", 7, 11),
        ("EPD0", 0, "forward", 11, 14),
    ]


def test_an_encoding_is_all_in_the_first_stage() -> None:
    """The text is 4 s in each of two stages; the image's 2 s in the first end at 6, and it is prefilled from then."""
    run = simulate([text(0, 8), pictures(0.5, 1, 1)], "1EPD", stages=2, budget=8)
    assert work(run, "encode") == [("EPD0", 0, "encode", 4, 6)]
    assert work(run, "forward")[2:] == [("EPD0", 0, "forward", 6, 7.5), ("EPD0", 1, "forward", 8, 9.5)]


def test_hand_over_takes_its_turn_between_steps() -> None:
    """The second batch holds the last 2 tokens of one prompt and the first 2 of the next; a block takes 0.5 s.

    The second prompt is handed over at 10, when a step of the first is on its way.
    """
    run = simulate([text(0, 6, output=4), text(0, 4, output=2)], "1E1P1D")
    assert [entry for entry in work(run) if entry[0] == "D0"] == [
        ("D0", 0, "migrate", 8, 9),
        ("D0", 0, "forward", 9, 10),
        ("D0", 0, "forward", 10, 11),
        ("D0", 0, "migrate", 11, 11.5),
        ("D0", 0, "forward", 11.5, 12.5),
        ("D0", 0, "forward", 12.5, 13.5),
    ]
    assert run.token_times == {0: [8, 10, 11, 12.5], 1: [10, 13.5]}


def test_a_migration_pulls_the_layers_of_each_stage() -> None:
    run = simulate([text(0, 8, output=2)], "1E1P1D", stages=2)
    assert work(run, "migrate") == [("D0", 0, "migrate", 6, 6.5), ("D0", 1, "migrate", 6.5, 7)]


def test_the_encoder_sends_its_embeddings_before_it_goes_on() -> None:
    run = simulate([pictures(0, 2, 1)], "1E1PD", timing=Timing(embedding_bytes_s=1.0), overlap="none")
    assert work(run, "encode", "send") == [
        ("E0", 0, "encode", 0, 2),
        ("E0", 0, "send", 2, 4),
        ("E0", 0, "encode", 4, 6),
        ("E0", 0, "send", 6, 8),
    ]
    assert run.results[0].ttft_s == 8 + 5


def test_the_head_of_a_chat_template_is_prefilled_while_the_image_is_encoded() -> None:
    run = simulate([pictures(0, 1, 1)], "1E1PD", template=Template(head=1, tail=1))
    assert work(run, "forward") == [("PD0", 0, "forward", 0, 1), ("PD0", 0, "forward", 2, 6)]
    assert run.prompt_tokens == [5]


def test_a_chat_template_is_around_images_alone() -> None:
    template = Template(head=2, between=1, tail=3)
    request = make_request(0, pictures(0, 2, 1), Grid(least=1), template, None)
    assert ([item.start for item in request.items], len(request.tokens)) == ([2, 5], 11)
    assert len(make_request(0, text(0, 4), Grid(least=1), template, None).tokens) == 4


def test_requests_state_the_slo_of_their_kind() -> None:
    """Two texts are in the window when two more come; of these the one that came later has the nearer deadline."""
    urgent = RequestSpec(at=2, kind="urgent", text_tokens=4, output_tokens=1)
    specs = [text(0, 4), text(0, 4), text(1, 4), urgent]
    run = simulate(specs, "1EPD", order="edf", slos={"urgent": SLO(ttft_s=1), "text": SLO(ttft_s=9)})
    assert [result.ttft_s for result in run.results] == [4, 8, 15, 10]


def test_intake_exchange_and_response_take_time() -> None:
    run = simulate([text(1, 4)], "1EPD", timing=Timing(intake_s=0.25, exchange_s=0.5, response_s=0.125))
    assert work(run) == [("EPD0", 0, "forward", 1.75, 5.75)]
    assert run.results[0].ttft_s == 0.25 + 0.5 + 4 + 0.5 + 0.125


def test_equal_plans_differ_as_much_as_is_said() -> None:
    specs = [pictures(100.0 * at, 1, 1) for at in range(2000)]
    run = simulate(specs, "1E1PD", timing=Timing(encode_spread=0.3), overlap="none")
    encodes = [end - start for *_, start, end in work(run, "encode")]
    assert len(encodes) == 2000
    assert statistics.fmean(encodes) == pytest.approx(2, rel=0.02)
    assert statistics.stdev(map(math.log, encodes)) == pytest.approx(0.3, rel=0.05)
    assert {round(end - start, 6) for *_, start, end in work(run, "forward")} == {3}


def test_instances_on_one_device_share_it() -> None:
    specs = (
        InstanceSpec(roles=("encode",), device="gpu"),
        InstanceSpec(roles=("prefill",), device="gpu"),
        InstanceSpec(roles=("decode",), device="gpu"),
    )
    run = simulate([pictures(0, 1, 1, output=2), text(0, 1)], specs, timing=Timing(embedding_bytes_s=1.0))
    assert work(run) == [  # nothing is copied: the arenas are shared
        ("E0", 0, "encode", 0, 2),
        ("P0", 0, "forward", 2, 3),
        ("P0", 0, "forward", 3, 6),
        ("D0", 0, "forward", 6, 7),
    ]


def test_topologies_are_written_as_in_the_papers() -> None:
    assert topology("5E1P2D", stages=2) == (
        InstanceSpec(roles=("encode",), count=5),
        InstanceSpec(roles=("prefill",), count=1, stages=2),
        InstanceSpec(roles=("decode",), count=2, stages=2),
    )
    assert topology("8EPD") == (InstanceSpec(roles=("encode", "prefill", "decode"), count=8),)
    with pytest.raises(TopologyError, match="1E1PD"):
        topology("encoder, language")
    with pytest.raises(TopologyError, match="no instance for encode"):
        simulate([], "1P1D")
