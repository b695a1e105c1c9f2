"""`epd bench`: a workload at one or several rates against a running server; metrics as data and as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import rich.console
from epd_scheduler.metrics_summary import SLO, Distribution, Group, RequestResult, Summary, goodput, summarise
from epd_scheduler.workload import Mix, RequestSpec, generate
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

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
    rate = sent_rate(specs)
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


def find_goodput(at: Callable[[list[RequestSpec]], float], mix: Mix, *, start: float, count: int, seed: int) -> str:
    """Search the goodput with `at`, which sends requests and returns the SLO attainment. Returns what to print."""

    def specs(rate: float) -> list[RequestSpec]:
        return generate(mix, rate=rate, count=count, seed=seed)

    found = goodput(lambda rate: at(specs(rate)), start=start)
    if not found:
        return "goodput: 0 requests/s; at no rate that was tried were 90 % of the SLOs met"
    sent = sent_rate(specs(found))
    return f"goodput: {found:.2f} requests/s asked for, {sent:.2f} sent, with 90 % of the SLOs met"


def sent_rate(specs: Sequence[RequestSpec]) -> float:
    """Requests a second from the start to the last arrival: near the rate asked for if there are many."""
    return len(specs) / max(specs[-1].at, 1e-9)


def table(run: Run) -> rich.console.Group:
    """The metrics of a run: a column a kind, a column a class of the server, a column for all."""
    summary = run.summary
    title = f"{run.label}: {run.workload}, {run.rate:.2f} requests/s sent, {summary.requests_s:.2f} answered"
    grid = Table("times in ms", box=None, pad_edge=False)
    columns = []
    for name, group in (*summary.kinds.items(), *summary.classes.items(), ("all", summary.overall)):
        grid.add_column(name, justify="right")
        columns.append(_cells(group))
    for metric in columns[0]:
        grid.add_row(metric, *(column[metric] for column in columns))
    return rich.console.Group(Text(title, "italic"), grid)


def _cells(group: Group) -> dict[str, str]:
    return {
        "requests": str(group.requests),
        "failed": str(group.failed),
        "TTFT mean": _ms(group.ttft_s, "mean"),
        "TTFT P50": _ms(group.ttft_s, "p50"),
        "TTFT P90": _ms(group.ttft_s, "p90"),
        "TTFT P99": _ms(group.ttft_s, "p99"),
        "TPOT mean": _ms(group.tpot_s, "mean"),
        "TPOT P99": _ms(group.tpot_s, "p99"),
        "e2e mean": _ms(group.e2e_s, "mean"),
        "e2e/token": _ms(group.normalised_s, "mean"),
        "SLO met": f"{group.attainment:.0%}",
        "missed by": f"{group.severity_s * 1e3:.0f}",
        "preempted": f"{group.preemptions}",
        "preempted for": f"{group.preempted_s * 1e3:.0f}",
    }


def _ms(distribution: Distribution | None, statistic: str) -> str:
    if distribution is None:
        return "-"
    value = getattr(distribution, statistic) * 1e3
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"
