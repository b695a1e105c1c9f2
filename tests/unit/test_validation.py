"""What the comparison of simulator and server takes from timelines and checkpoints: against literals."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from epd_client import bench
from epd_client.load import Observation
from epd_client.timeline import Span, Timeline
from epd_scheduler.metrics_summary import RequestResult, summarise
from epd_scheduler.profile import EncodeCost, ForwardCost, Profile
from epd_scheduler.simulation.requests import Template
from epd_scheduler.workload import RequestSpec

from benchmarks import calibration, validation

DIGITS = Path(__file__).parents[2] / "models" / "digits-vl"
SPEC = RequestSpec(at=1.0, kind="probe", text_tokens=4, output_tokens=2)


def seen(*spans: Span, sent: float, token: float) -> Observation:
    return Observation(SPEC, sent=sent, tokens=[token, token + 1], timeline=Timeline(100.0, 200.0, spans))


def test_the_tokens_around_images_are_those_of_the_chat_template() -> None:
    """<|im_start|>user\n<|vision_start|>, <|vision_end|><|vision_start|>, <|vision_end|>...<|im_end|>\n and so on."""
    assert calibration.template(DIGITS) == Template(head=7, between=2, tail=14)


def test_time_around_plans_is_read_off_requests_that_ran_alone() -> None:
    text = seen(
        Span("prefill", 100.010, 100.110),
        Span("first token", 100.112, 100.112),
        Span("prefill", 100.2, 100.3),  # again, after a preemption
        sent=5.0,
        token=5.118,
    )
    image = seen(
        Span("encode", 100.010, 100.110),
        Span("prefill", 100.120, 100.220),
        Span("first token", 100.222, 100.222),
        sent=6.0,
        token=6.228,
    )
    made = calibration.timing([text, image])
    assert (made.intake_s, made.exchange_s, made.response_s) == pytest.approx((0.008 + 0.003, 0.002, 0.003))


def test_plans_are_compared_with_the_profile_one_by_one() -> None:
    """Two images in one plan, 30 rows in 0.6 s, then one of 20 rows in 0.2 s.

    The first chunk of the second request runs while the first one decodes, at a context of 50: a row of 1 token.
    """
    image = {"item": 0, "unit": 0}
    first = (
        Span("encode", 0.0, 0.6, "e", image | {"rows": 10}),
        Span("encode", 0.0, 0.6, "e", image | {"rows": 20}),
        Span("prefill", 0.6, 1.0, "l", {"first": 0, "tokens": 50}),
        Span("decode", 1.0, 3.0),
    )
    second = (
        Span("encode", 0.6, 0.8, "e", image | {"rows": 20}),
        Span("prefill", 1.5, 1.8, "l", {"first": 0, "tokens": 20}),
        Span("prefill", 2.9, 3.1, "l", {"first": 20, "tokens": 9}),
    )
    run = made_run(timelines=[Timeline(0.0, 3.0, first), Timeline(0.0, 4.0, second)])
    factor, spread = validation.encoder_speed(run, EncodeCost(per_row=0.01))
    assert (factor, spread) == pytest.approx((0.8 / 0.5, math.log(2) / 2))  # twice, and as long as expected
    cost = ForwardCost(per_token=0.01, per_context=0.001)
    assert validation.language_speed(run, cost).factor == pytest.approx(0.9 / (0.5 + (0.21 + 0.051) + 0.09))
    assert validation.encoder_speed(made_run(timelines=[]), EncodeCost()) == (1, 0)


def test_errors_are_relative_to_what_was_measured() -> None:
    measured, simulated = made_run(timelines=[]), made_run(timelines=[], first_token=0.3, end=4.0)
    profile = Profile("m", "d", EncodeCost(), ForwardCost(), kv_bytes_token=1, embedding_bytes_row=1)
    made = validation.compare("text", measured, profile, lambda *_, **__: simulated.summary)
    assert validation.markdown([made]).splitlines()[-1] == (
        "| text | 1.00 | 0.200 | 0.300 | +50.0% | 0.200 | 0.300 | +50.0% | 1.0 | 0.5 | -50.0% | 2.0 "
        "| 1.00 ± 0% | 1.00 ± 0% | +50.0% | +50.0% |"
    )


def made_run(timelines: list[Timeline], first_token: float = 0.2, end: float = 2.0) -> bench.Run:
    results = [RequestResult(kind="text", arrival=0.0, first_token=first_token, end=end, output_tokens=2)]
    return bench.Run(
        label="",
        workload="",
        rate=1.0,
        slos={},
        summary=summarise(results, {}),
        results=results,
        send_lag_s=0.002,
        timelines=timelines,
    )
