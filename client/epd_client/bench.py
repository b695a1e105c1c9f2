"""`epd bench`: a workload at one or several rates against a running server; metrics as data and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from epd_scheduler.metrics_summary import SLO, Distribution, Group, RequestResult, Summary, summarise
from epd_scheduler.workload import RequestSpec
from rich.progress import Progress
from rich.table import Table

from epd_client import load
from epd_client.payload import TextMaker
from epd_client.timeline import Timeline


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One workload at one rate: everything that tables and plots need."""

    label: str  # what is compared, e.g. the scheduling order
    workload: str
    rate: float  # requests a second that were sent
    slos: dict[str, SLO]  # by kind
    summary: Summary
    results: list[RequestResult]
    seed: int = 0
    send_lag_s: float = 0.0  # P99 of sent after scheduled: of the load generator, and small if it kept up
    timelines: list[Timeline] = []


class RunsError(ValueError):
    """A file of results cannot be used; the message says why."""


def measure(
    url: str,
    specs: Sequence[RequestSpec],
    text: TextMaker,
    *,
    label: str,
    workload: str,
    slos: Mapping[str, SLO],
    seed: int = 0,
    distinct: bool = True,
    timeout_s: float = 300.0,
    progress: Progress | None = None,
) -> Run:
    """Send a workload and wait for its end. Failed requests count in the metrics; they raise nothing."""
    rate = len(specs) / max(specs[-1].at, 1e-9)
    requests = load.prepare(specs, text, slos, seed=seed, distinct=distinct)
    if progress is None:
        seen = load.run(url, requests, timeout_s=timeout_s)
    else:
        task = progress.add_task(f"{label}: {rate:.2f} requests/s", total=len(requests))
        seen = load.run(url, requests, timeout_s=timeout_s, done=lambda: progress.advance(task))
    results = [observation.result for observation in seen]
    return Run(
        label=label,
        workload=workload,
        rate=rate,
        slos=dict(slos),
        summary=summarise(results, slos),
        results=results,
        seed=seed,
        send_lag_s=float(np.percentile([o.sent - o.spec.at for o in seen], 99)),
        timelines=[observation.timeline for observation in seen if observation.timeline],
    )


def save(runs: Sequence[Run], path: Path) -> None:
    """Write runs as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(runs))


def read(paths: Sequence[Path]) -> list[Run]:
    """Runs of several files. Raises RunsError."""
    runs = []
    for path in paths:
        try:
            runs += msgspec.json.decode(path.read_bytes(), type=list[Run])
        except (OSError, msgspec.DecodeError) as error:
            raise RunsError(f"{path}: {error}; give files that `epd bench` has written") from error
    return runs


def table(run: Run) -> Table:
    """The metrics of a run: a line a kind, a line a class of the server, a line for all. Milliseconds."""
    summary = run.summary
    title = f"{run.label}: {run.workload}, {run.rate:.2f} requests/s sent, {summary.requests_s:.2f} answered"
    grid = Table(title=title, title_justify="left", box=None, pad_edge=False)
    grid.add_column("")
    heads = ("requests", "failed", "TTFT mean", "P50", "P90", "P99", "TPOT mean", "P99", "e2e mean", "e2e/token")
    for head in (*heads, "SLO met", "missed by", "preempted", "for"):
        grid.add_column(head, justify="right")
    for name, group in (*summary.kinds.items(), *summary.classes.items(), ("all", summary.overall)):
        grid.add_row(name, *_cells(group))
    return grid


def _cells(group: Group) -> list[str]:
    ttft, tpot = group.ttft_s, group.tpot_s
    return [
        str(group.requests),
        str(group.failed),
        *(_ms(ttft, name) for name in ("mean", "p50", "p90", "p99")),
        *(_ms(tpot, name) for name in ("mean", "p99")),
        _ms(group.e2e_s, "mean"),
        _ms(group.normalised_s, "mean"),
        f"{group.attainment:.0%}",
        f"{group.severity_s * 1e3:.0f}",
        str(group.preemptions),
        f"{group.preempted_s * 1e3:.0f}",
    ]


def _ms(distribution: Distribution | None, statistic: str) -> str:
    return f"{getattr(distribution, statistic) * 1e3:.1f}" if distribution else "-"
