"""Every metric against a value worked out by hand."""

import math

import pytest
from epd_scheduler.metrics_summary import SLO, Distribution, RequestResult, goodput, summarise

FAST = RequestResult(kind="text", klass="sand", arrival=0.0, first_token=0.1, end=1.1, output_tokens=11)
SLOW = RequestResult(
    kind="image", klass="rock", arrival=1.0, first_token=3.0, end=5.0, output_tokens=5, preemptions=2, preempted_s=0.7
)
FAILED = RequestResult(kind="text", arrival=2.0, end=2.5, error="UNAVAILABLE: gone")
SLOS = {"text": SLO(ttft_s=0.2, tpot_s=0.2), "image": SLO(ttft_s=1.5)}


def test_one_request() -> None:
    assert (SLOW.ttft_s, SLOW.tpot_s, SLOW.e2e_s) == (2.0, 0.5, 4.0)
    assert FAST.tpot_s == pytest.approx(0.1)
    single = RequestResult(kind="text", arrival=0.0, first_token=1.0, end=1.0, output_tokens=1)
    assert single.tpot_s == 0.0
    assert FAILED.ttft_s == math.inf
    assert not FAILED.ok


def test_lateness() -> None:
    assert FAST.lateness(SLO(ttft_s=0.2, tpot_s=0.2)) == 0
    assert SLOW.lateness(SLO(ttft_s=1.5)) == 0.5
    assert SLOW.lateness(SLO(ttft_s=1.5, tpot_s=0.25)) == 1.0  # four gaps, each 0.25 s late
    assert FAILED.lateness(SLO()) == math.inf
    assert SLOW.lateness(SLO(ttft_s=1.5).scaled(2)) == 0


def test_percentiles_are_interpolated() -> None:
    assert Distribution.of([1.0, 2.0, 3.0, 4.0]) == Distribution(2.5, 2.5, pytest.approx(3.7), pytest.approx(3.97))
    assert Distribution.of([]) is None


def test_summary() -> None:
    summary = summarise([FAST, SLOW, FAILED], SLOS)
    assert summary.duration_s == 5.0
    assert summary.requests_s == 0.4
    assert summary.output_tokens_s == 3.2
    assert list(summary.kinds) == ["text", "image"]
    assert list(summary.classes) == ["sand", "rock"]
    assert summary.overall.attainment == pytest.approx(1 / 3)
    assert summary.overall.severity_s == 0.5
    text, image = summary.kinds["text"], summary.kinds["image"]
    assert (text.requests, text.failed, text.attainment, text.severity_s) == (2, 1, 0.5, 0.0)
    assert (image.preemptions, image.preempted_s) == (2, 0.7)
    assert image.normalised_s is not None
    assert image.normalised_s.mean == 0.8


def test_no_results_are_an_error() -> None:
    with pytest.raises(ValueError, match="no results"):
        summarise([], {})


@pytest.mark.parametrize("start", [0.5, 7.0, 100.0])
def test_goodput_finds_the_limit(start: float) -> None:
    found = goodput(lambda rate: 1.0 if rate <= 3.0 else 0.5, start=start)
    assert 3.0 * 0.95 <= found <= 3.0


def test_goodput_of_a_server_that_never_keeps_up_is_zero() -> None:
    assert goodput(lambda _rate: 0.0, start=1.0, doublings=4) == 0.0
