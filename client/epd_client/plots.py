"""Plots of benchmark runs and profiles. Needs matplotlib; nothing else of the client imports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from epd_scheduler.metrics_summary import RequestResult, attainment

from epd_client.bench import Run
from epd_client.timeline import Span, Timeline

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import NullFormatter

COLOURS = {"encode": "tab:cyan", "prefill": "tab:orange", "migrate": "tab:purple", "decode": "tab:green"}
SLO_SCALES = np.geomspace(0.25, 4.0, 33)


def write_all(runs: Sequence[Run], directory: Path) -> list[Path]:
    """All plots that the runs have data for, as PNG files. Returns their paths."""
    figures = {"ttft_cdf": cdf(runs), "slo_attainment": attainment_curves(runs)}
    if len({round(run.rate, 3) for run in runs}) > 1:
        figures["ttft_rate"] = rate_curves(runs)
    for run in _highest_rates(runs):
        if run.timelines:
            figures[f"occupancy_{_file_name(run.label)}"] = gantt(
                run.timelines, f"{run.label}, {run.rate:.2f} requests/s"
            )
    paths = []
    for name, figure in figures.items():
        paths.append(directory / f"{name}.png")
        save(figure, paths[-1])
    return paths


def rate_curves(runs: Sequence[Run]) -> Any:
    """Mean and P90 TTFT against the request rate: a column a kind and one for all, a line a label."""
    kinds = _kinds(runs)
    figure, axes = plt.subplots(
        2, len(kinds) + 1, figsize=(3.4 * (len(kinds) + 1), 5.5), sharex=True, squeeze=False, layout="constrained"
    )
    for column, kind in enumerate([*kinds, "all"]):
        for row, statistic in enumerate(("mean", "p90")):
            axis = axes[row][column]
            for label, group in _by_label(runs).items():
                points = []
                for run in sorted(group, key=lambda run: run.rate):
                    chosen = run.summary.overall if kind == "all" else run.summary.kinds.get(kind)
                    if chosen and chosen.ttft_s:
                        points.append((run.rate, getattr(chosen.ttft_s, statistic)))
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
            axis.set(yscale="log", title=f"{kind}, {statistic.capitalize()}")
            axis.grid(alpha=0.3)
        axes[1][column].set_xlabel("requests / s")
    for row in axes:
        row[0].set_ylabel("TTFT (s)")
    axes[0][0].legend()
    return figure


def cdf(runs: Sequence[Run]) -> Any:
    """Distribution of TTFT at the highest rate of each label: a panel a kind."""
    kinds = _kinds(runs)
    figure, axes = plt.subplots(1, len(kinds), figsize=(3.6 * len(kinds), 3), squeeze=False, layout="constrained")
    for axis, kind in zip(axes[0], kinds, strict=True):
        for run in _highest_rates(runs):
            times = sorted(result.ttft_s for result in run.results if result.kind == kind and result.ok)
            axis.step(times, np.arange(1, len(times) + 1) / max(len(times), 1), where="post", label=run.label)
        axis.set(title=kind, xlabel="TTFT (s)", xscale="log", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("share of requests")
    axes[0][0].legend()
    return figure


def attainment_curves(runs: Sequence[Run]) -> Any:
    """SLO attainment against the rate, and, at each label's highest rate, against a common factor of all SLOs."""
    figure, (by_rate, by_scale) = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for label, group in _by_label(runs).items():
        ordered = sorted(group, key=lambda run: run.rate)
        met = [run.summary.overall.attainment for run in ordered]
        by_rate.plot([run.rate for run in ordered], met, marker="o", markersize=3, label=label)
    for run in _highest_rates(runs):
        by_scale.plot(SLO_SCALES, [_scaled(run.results, run, factor) for factor in SLO_SCALES], label=run.label)
    for axis, what in ((by_rate, "requests / s"), (by_scale, "SLO scale")):
        axis.axhline(0.9, color="grey", linewidth=0.8, linestyle=":")
        axis.set(xlabel=what, ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    by_scale.set_xscale("log", base=2)
    by_rate.set_ylabel("SLO attainment")
    by_rate.legend()
    return figure


def gantt(timelines: Sequence[Timeline], title: str) -> Any:
    """Which instance was busy with what: a lane an instance, white where it waited (a bubble).

    Decoding has a lane of its own, in which an open answer is drawn from its first decode step to its end.
    """
    origin = min(timeline.arrival for timeline in timelines)
    lanes: dict[str, dict[tuple[str, float, float], Span]] = {}  # spans of one plan are one
    for timeline in timelines:
        for span in timeline.spans:
            if span.name in COLOURS:
                key = (span.name, span.start, span.end)
                lanes.setdefault(span.instance or f"{span.name} (open)", {})[key] = span
    names = sorted(lanes, key=lambda name: list(COLOURS).index(next(iter(lanes[name].values())).name))
    end = max(timeline.end for timeline in timelines) - origin
    figure, axis = plt.subplots(figsize=(11, 0.9 + 0.5 * len(names)), layout="constrained")
    for lane, name in enumerate(names):
        for span in lanes[name].values():
            bar = [(span.start - origin, max(span.end - span.start, 1e-4))]
            axis.broken_barh(bar, (lane - 0.4, 0.8), color=COLOURS[span.name], alpha=1.0 if span.instance else 0.15)
        busy = _covered([(span.start, span.end) for span in lanes[name].values()])
        axis.text(end * 1.005, lane, f"{busy / end:.0%} busy", va="center", fontsize=8)
    axis.set(yticks=range(len(names)), yticklabels=names, xlim=(0, end), xlabel="seconds", title=title)
    axis.invert_yaxis()
    return figure


def fits(panels: Mapping[str, tuple[Sequence[float], Sequence[float]]], what: str) -> Any:
    """Predicted against measured seconds, a panel each, with the diagonal: panel name -> (measured, predicted)."""
    figure, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.4), squeeze=False, layout="constrained")
    for axis, (name, (measured, predicted)) in zip(axes[0], panels.items(), strict=True):
        limits = [0.8 * min(*measured, *predicted), 1.25 * max(*measured, *predicted)]
        axis.plot(limits, limits, color="grey", linewidth=0.8)
        axis.scatter(measured, predicted, s=12, alpha=0.7)
        axis.set(title=name, xlabel="measured (s)", xscale="log", yscale="log", xlim=limits, ylim=limits)
        axis.grid(alpha=0.3)
        for each in (axis.xaxis, axis.yaxis):
            each.set_minor_formatter(NullFormatter())  # labels of a panel this narrow would overlap
    axes[0][0].set_ylabel(f"{what} (s)")
    return figure


def estimates(points: Mapping[str, Sequence[tuple[float, float]]]) -> Any:
    """Estimated against measured TTFT alone, and how the error is distributed: kind -> [(measured, estimated)]."""
    figure, (scatter, errors) = plt.subplots(1, 2, figsize=(8.4, 3.6), layout="constrained")
    every = [value for pairs in points.values() for pair in pairs for value in pair]
    limits = (0.8 * min(every), 1.25 * max(every))
    scatter.plot(limits, limits, color="grey", linewidth=0.8)
    for kind, pairs in points.items():
        scatter.scatter(*zip(*pairs, strict=True), s=14, alpha=0.7, label=kind)
        relative = sorted(estimated / measured - 1 for measured, estimated in pairs)
        errors.step(relative, np.arange(1, len(relative) + 1) / len(relative), where="post", label=kind)
    scatter.set(
        xlabel="measured TTFT (s)", ylabel="estimated (s)", xscale="log", yscale="log", xlim=limits, ylim=limits
    )
    errors.axvline(0, color="grey", linewidth=0.8)
    errors.set(xlabel="relative error of the estimate", ylabel="share of requests", ylim=(0, 1.02))
    for axis in (scatter, errors):
        axis.grid(alpha=0.3)
    scatter.legend()
    return figure


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def _scaled(results: Sequence[RequestResult], run: Run, factor: float) -> float:
    return attainment(results, {kind: slo.scaled(factor) for kind, slo in run.slos.items()})


def _covered(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, -np.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _kinds(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(kind for run in runs for kind in run.summary.kinds))


def _by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    return {label: [run for run in runs if run.label == label] for label in dict.fromkeys(run.label for run in runs)}


def _highest_rates(runs: Sequence[Run]) -> list[Run]:
    return [max(group, key=lambda run: run.rate) for group in _by_label(runs).values()]


def _file_name(label: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in label)
