"""The commands that measure: `epd bench`, `epd plot`, `epd profile`. What they need is imported when they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from epd_client.client import Client, EpdError
from epd_client.install import InstallError
from epd_client.launch import LaunchError, Server

if TYPE_CHECKING:
    from epd_client.bench import Run

console = Console(highlight=False)

Url = Annotated[str, typer.Option(help="A running server's gRPC address; '' starts one for the measurement.")]
Repository = Annotated[Path, typer.Option(help="Model repository of the server that is started.")]
ConfigName = Annotated[str, typer.Option(help="Which configs/NAME.pbtxt of each of its models.")]
Workload = Annotated[Path, typer.Option(help="Mix of requests (YAML).")]
Seed = Annotated[int, typer.Option(help="The same seed sends the same requests.")]


def bench(
    workload: Workload = Path("deploy/workloads/heavy.yaml"),
    trace: Annotated[Path | None, typer.Option(help="Trace (JSON lines) in place of Poisson arrivals.")] = None,
    rate: Annotated[list[float] | None, typer.Option(help="Requests a second; may be given several times.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests at each rate.")] = 100,
    goodput: Annotated[bool, typer.Option(help="Find the highest rate with >= 90 % SLO attainment.")] = False,
    slo_scale: Annotated[float, typer.Option(help="Factor of all SLOs.")] = 1.0,
    seed: Seed = 0,
    same_images: Annotated[bool, typer.Option(help="One image a size, so that the embedding cache hits.")] = False,
    label: Annotated[str, typer.Option(help="Name in tables and plots, e.g. the scheduling order.")] = "server",
    timeout: Annotated[float, typer.Option(help="Seconds after which a request has failed.")] = 300.0,
    out: Annotated[Path, typer.Option(help="Results (JSON), for `epd plot`.")] = Path("build/bench/bench.json"),
    url: Url = "localhost:8001",
    repository: Repository = Path("model_repository"),
    config_name: ConfigName = "cpu",
) -> None:
    """Send an open-loop load and report latencies, counted from the scheduled arrivals."""
    from epd_scheduler import metrics_summary
    from epd_scheduler.workload import RequestSpec, WorkloadError, generate, load_mix, load_trace

    from epd_client import bench as benchmark
    from epd_client.payload import TextMaker

    try:
        mix = load_mix(workload)
        slos = {kind: slo.scaled(slo_scale) for kind, slo in mix.slos.items()}
        runs: list[Run] = []
        with _server(url, repository, config_name) as address, benchmark.progress_bar() as progress:
            with Client(address) as client:
                text = TextMaker.calibrate(client)

            def at(specs: list[RequestSpec]) -> float:
                run = benchmark.measure(
                    address,
                    specs,
                    text,
                    label=label,
                    workload=mix.name,
                    slos=slos,
                    seed=seed,
                    distinct=not same_images,
                    timeout_s=timeout,
                    progress=progress,
                )
                progress.console.print(benchmark.table(run))
                runs.append(run)
                return run.summary.overall.attainment

            if trace:
                at(load_trace(trace))
            for each in rate or ([] if trace or goodput else [1.0]):
                at(generate(mix, rate=each, count=requests, seed=seed))
            if goodput:
                found = metrics_summary.goodput(
                    lambda each: at(generate(mix, rate=each, count=requests, seed=seed)), start=(rate or [1.0])[-1]
                )
                progress.console.print(f"goodput: {found:.2f} requests/s with at least 90 % of the SLOs met")
    except (EpdError, InstallError, LaunchError, WorkloadError) as error:
        _fail(str(error))
    benchmark.save(runs, out)
    console.print(f"results: {out}; plots of one or several such files: epd plot {out}")
    if failures := [result.error for run in runs for result in run.results if result.error]:
        _fail(f"{len(failures)} requests failed, the first with: {failures[0]}")


def plot(
    results: Annotated[list[Path], typer.Argument(help="Files written by `epd bench`, e.g. one for each order.")],
    out: Annotated[Path, typer.Option(help="Directory for the PNG files.")] = Path("build/bench"),
) -> None:
    """Draw TTFT against rate, CDFs, SLO attainment and the occupancy of the pipeline from benchmark results."""
    from epd_client import bench as benchmark

    try:
        from epd_client import plots
    except ImportError as error:
        _fail(f"{error}; install it with: pip install 'triton-epd[bench]'")
    try:
        paths = plots.write_all(benchmark.read(results), out)
    except benchmark.RunsError as error:
        _fail(str(error))
    for path in paths:
        console.print(str(path))


@contextmanager
def _server(url: str, repository: Path, config_name: str) -> Iterator[str]:
    """The gRPC address of the server to measure; one that is started here is stopped again."""
    if url:
        yield url
        return
    with Server(repository, config_name=config_name or None, ready_timeout_s=300) as server:
        yield server.grpc


def _fail(message: str) -> NoReturn:
    Console(stderr=True, highlight=False).print(f"error: {message}", markup=False, style="red", soft_wrap=True)
    raise typer.Exit(1)
