"""What the simulated experiments share: running them, tables in docs/results.md, plots in docs/results/."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from epd_scheduler.config import Config, EmbeddingConfig, KVConfig, SchedulerConfig
from epd_scheduler.metrics_summary import RequestResult
from epd_scheduler.profile import Profile, load_profile
from epd_scheduler.simulation.devices import Timing
from epd_scheduler.simulation.engine import Run, Simulation
from epd_scheduler.simulation.images import Vision
from epd_scheduler.simulation.topology import InstanceSpec
from epd_scheduler.workload import RequestSpec

mpl.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results.md"

# Beside computation: a few milliseconds of tokenising, a round trip between orchestrator and worker as measured with
# Triton on a CPU host, NVLink at two thirds of its bandwidth for embeddings.
TIMING = Timing(intake_s=0.003, exchange_s=0.0003, hop_s=0.0002, embedding_bytes_s=200e9)


def profile(name: str) -> Profile:
    return load_profile(ROOT / "deploy" / "profiles" / f"{name}.yaml")


def simulate(
    specs: Sequence[RequestSpec],
    instances: tuple[InstanceSpec, ...],
    model: Profile,
    vision: Vision,
    scheduler: SchedulerConfig,
    *,
    kv_blocks: int,
    embedding_blocks: int,
    record: bool = False,
) -> Run:
    config = Config(
        kv=KVConfig(blocks=kv_blocks), embedding=EmbeddingConfig(blocks=embedding_blocks), scheduler=scheduler
    )
    run = Simulation(config, instances, model, vision=vision, timing=TIMING, record=record).run(specs)
    failed = [result.error for result in run.results if result.error]
    assert not failed, failed[0]
    return run


def mean_ttft(results: Sequence[RequestResult]) -> float:
    return float(np.mean([result.ttft_s for result in results]))


def prompt_tokens_s(run: Run) -> float:
    """Prompt tokens a second, from the first arrival to the last end."""
    duration = max(result.end for result in run.results) - run.results[0].arrival
    return sum(run.prompt_tokens) / duration


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def publish(name: str, markdown: str) -> None:
    """Print, and put between the markers `<!-- name -->` and `<!-- /name -->` of docs/results.md."""
    print(f"\n{name}\n{markdown}", flush=True)
    text = RESULTS.read_text()
    block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    text, count = block.subn(lambda match: f"{match[1]}{markdown}\n{match[2]}", text)
    assert count == 1, f"{RESULTS} needs one block '{name}'"
    RESULTS.write_text(text)


def save(figure: Any, name: str) -> None:
    path = RESULTS.parent / "results" / f"{name}.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100, bbox_inches="tight")
    plt.close(figure)


def curves(series: dict[str, tuple[Sequence[float], Sequence[float]]], axis: Any, **labels: Any) -> None:
    """Lines with markers: name -> (x, y)."""
    for name, (x, y) in series.items():
        axis.plot(x, y, marker="o", markersize=3, label=name)
    axis.set(**labels)
    if labels.get("xscale") == "log":
        ticks = sorted({value for x, _ in series.values() for value in x})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
