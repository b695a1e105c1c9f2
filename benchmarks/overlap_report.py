"""The result of `benchmarks/overlap.py` as tables and as a picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import matplotlib as mpl
from rich.console import Console
from rich.table import Table

mpl.use("Agg")
import matplotlib.pyplot as plt


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console(width=110)
    console.print(f"{result['host']}, {result['dtype']}, fastest of {result['repetitions']}")
    table = Table("images", "none", "full", "faster by", "floor", "over floor", "intake", "gaps", "encode", "prefill")
    for column in table.columns:
        column.justify = "right"
    for images, none, full in _pairs(result):
        stages = full["stages"]
        table.add_row(
            str(images),
            _ms(none["ttft"]),
            _ms(full["ttft"]),
            f"{none['ttft'] / full['ttft']:.2f} x",
            _ms(stages["overlapped_floor"]),
            f"{full['ttft'] / stages['overlapped_floor'] - 1:.1%}",
            f"{stages['intake'] / full['ttft']:.1%}",
            f"{stages['gaps'] / full['ttft']:.1%}",
            _ms(sum(stages["encode"])),
            _ms(sum(stages["prefill"])),
        )
    console.print(table)
    console.print(
        "TTFT and stages in ms; intake, gaps: share of TTFT before the first stage, and with no stage at work"
    )
    step, bare = result["decode_step"], result["bare_forward"]
    console.print(
        f"decode step at 8 sequences: {_ms(step)} ms, bare forward {_ms(bare)} ms, overhead {step / bare - 1:.1%}"
    )
    busy = sum(run["idle"] < 0.9 for run in result["runs"])
    if busy:
        console.print(f"{busy} of {len(result['runs'])} requests were sent while the machine was busy")


def draw(result: dict[str, Any], path: Path) -> None:
    """TTFT against the number of images, with the floor."""
    pairs = _pairs(result)
    counts = [images for images, _, _ in pairs]
    figure, axes = plt.subplots(figsize=(6.4, 4))
    axes.plot(counts, [none["ttft"] for _, none, _ in pairs], "o-", label="overlap: none")
    axes.plot(counts, [full["ttft"] for _, _, full in pairs], "o-", label="overlap: full")
    floors = [full["stages"]["overlapped_floor"] for _, _, full in pairs]
    axes.plot(counts, floors, "k--", lw=1, label="floor of the overlapped pipeline")
    axes.set(xscale="log", yscale="log", xlabel="images of 448 x 448", ylabel="time to first token, s")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    ticks = [value for value in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if min(floors) / 2 < value < 2 * pairs[-1][1]["ttft"]]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"picture: {os.path.relpath(path)}")


def _pairs(result: dict[str, Any]) -> list[tuple[int, dict[str, Any], dict[str, Any]]]:
    by = {(run["overlap"], run["images"]): run for run in result["best"]}
    return [(images, by["none", images], by["full", images]) for images in sorted({n for _, n in by})]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"
