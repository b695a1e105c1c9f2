"""Plots show the numbers they are given."""

import numpy as np
import pytest
from epd_client import plots
from epd_client.bench import Run, RunsError, read, save
from epd_client.timeline import Span, Timeline
from epd_scheduler.metrics_summary import SLO, RequestResult, summarise

TIMELINE = Timeline(
    10.0,
    14.0,
    (
        Span("encode", 10.0, 11.0, "encoder", {"item": 0}),
        Span("encode", 10.0, 11.0, "encoder", {"item": 1}),  # the same plan
        Span("encode", 12.0, 13.0, "encoder", {"item": 2}),
        Span("prefill", 11.0, 14.0, "prefill", {"first": 0, "tokens": 9}),
        Span("first token", 14.0, 14.0),
    ),
)


def run(label: str, rate: float, ttft: float) -> Run:
    results = [RequestResult(kind="text", arrival=t, first_token=t + ttft, end=t + 2, output_tokens=5) for t in (0, 1)]
    slos = {"text": SLO(ttft_s=1.0)}
    return Run(label=label, workload="w", rate=rate, slos=slos, summary=summarise(results, slos), results=results)


RUNS = [run("fcfs", 1.0, 0.5), run("fcfs", 2.0, 1.5), run("rps", 1.0, 0.5), run("rps", 2.0, 0.75)]


def lines(axis) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in axis.get_lines() if line.get_label()[0] != "_"}


def test_occupancy_counts_a_plan_once_and_leaves_bubbles() -> None:
    (axis,) = plots.gantt([TIMELINE], "t").axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["encoder", "prefill"]
    assert [text.get_text() for text in axis.texts] == ["50% busy", "75% busy"]
    assert len(axis.collections) == 3


def test_ttft_against_rate() -> None:
    axes = plots.rate_curves(RUNS).axes
    assert [axis.get_title() for axis in axes] == ["text, Mean", "all, Mean", "text, P90", "all, P90"]
    assert lines(axes[0]) == {"fcfs": [0.5, 1.5], "rps": [0.5, 0.75]}


def test_attainment_by_rate_and_by_scale() -> None:
    by_rate, by_scale = plots.attainment_curves(RUNS).axes
    assert lines(by_rate) == {"fcfs": [1.0, 0.0], "rps": [1.0, 1.0]}
    scales = plots.SLO_SCALES
    assert lines(by_scale) == {
        "fcfs": [float(scale >= 1.5) for scale in scales],
        "rps": [float(scale >= 0.75) for scale in scales],
    }


def test_cdf_is_of_the_highest_rate() -> None:
    (axis,) = plots.cdf(RUNS).axes
    fcfs = axis.get_lines()[0]
    assert np.allclose(fcfs.get_xdata(), [1.5, 1.5])
    assert list(fcfs.get_ydata()) == [0.5, 1.0]


def test_runs_survive_their_file(tmp_path) -> None:
    save(RUNS, tmp_path / "a" / "runs.json")
    assert read([tmp_path / "a" / "runs.json"]) == RUNS
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(RunsError, match="epd bench"):
        read([tmp_path / "bad.json"])
