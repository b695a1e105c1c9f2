"""The commands that measure: `epd bench`, `epd plot`, `epd profile`. What they need is imported when they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from epd_client.client import Client, EpdError
from epd_client.control import encodes_apart
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
    from epd_scheduler.workload import RequestSpec, WorkloadError, generate, load_mix, load_trace

    from epd_client import bench as benchmark
    from epd_client.payload import TextMaker

    try:
        mix = load_mix(workload)
        slos = {kind: slo.scaled(slo_scale) for kind, slo in mix.slos.items()}
        runs: list[Run] = []
        with _server(url, repository, config_name) as address, _progress() as progress:
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
                start = (rate or [1.0])[-1]
                progress.console.print(benchmark.find_goodput(at, mix, start=start, count=requests, seed=seed))
    except (EpdError, InstallError, LaunchError, WorkloadError) as error:
        _fail(str(error))
    benchmark.save(runs, out)
    console.print(f"results: {out}; plots of one or several such files: epd plot {out}", soft_wrap=True)
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


def profile(
    out: Annotated[Path, typer.Option(help="The profile file to write (YAML).")],
    config: Annotated[Path, typer.Option(help="The server's configuration.")] = Path("deploy/epd.yaml"),
    workload: Annotated[Path, typer.Option(help="Mix to train the classes on and to check the estimates with.")] = Path(
        "deploy/workloads/heavy.yaml"
    ),
    repeats: Annotated[int, typer.Option(min=1, help="Times that each probe counts; the median is taken.")] = 3,
    checks: Annotated[int, typer.Option(min=0, help="Requests of the mix to check the estimates with.")] = 40,
    note: Annotated[str, typer.Option(help="What else to say of the device, e.g. how cores are pinned.")] = "unpinned",
    plots: Annotated[Path, typer.Option(help="Directory for plots.")] = Path("build/profile"),
    url: Url = "",
    repository: Repository = Path("model_repository"),
    config_name: ConfigName = "cpu",
) -> None:
    """Measure what encoding, prefill and decoding cost on an idle server, and write the profile of model and host."""
    from epd_scheduler.config import ConfigError
    from epd_scheduler.config import load as load_config
    from epd_scheduler.impact import ImpactEstimator
    from epd_scheduler.profile import ProfileError, save_profile
    from epd_scheduler.workload import WorkloadError, generate, load_mix

    from epd_client.payload import TextMaker

    try:
        from epd_client import profile_builder as builder
        from epd_client.profiling import Profiler
    except ImportError as error:
        _fail(f"{error}; install it with: pip install 'triton-epd[bench]'")
    try:
        settings, mix = load_config(config), load_mix(workload)
        model, layout = builder.read_layout(Path(settings.model))
        environment = {"EPD_CONFIG": str(config.resolve())}
        with _server(url, repository, config_name, environment) as address, _progress() as progress:
            task = progress.add_task("profile")

            def step(what: str, done: int, total: int) -> None:
                progress.update(task, description=what, completed=done, total=total)

            apart = encodes_apart(address)
            with Client(address) as client:
                profiler = Profiler(address, settings, layout, TextMaker.calibrate(client))
            fits = builder.fit(profiler.collect(repeats, step))
            made = builder.build(fits, model, settings, mix, layout, builder.this_host(note), apart=apart)
            specs = generate(mix, rate=1.0, count=checks, seed=1)
            estimator = ImpactEstimator(made, settings.scheduler)
            predictions = builder.check(profiler, estimator, layout, specs, step, apart=apart)
    except (EpdError, InstallError, LaunchError, ConfigError, ProfileError, WorkloadError, OSError) as error:
        _fail(str(error))
    out.parent.mkdir(parents=True, exist_ok=True)
    save_profile(made, out)
    console.print(builder.fit_table(fits))
    if predictions:
        console.print(builder.check_table(predictions))
    console.print(f"profile: {out}")
    for path in builder.draw(fits, predictions, plots):
        console.print(f"plot: {path}")


def _progress() -> Progress:
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, disable=not console.is_terminal)


@contextmanager
def _server(
    url: str, repository: Path, config_name: str, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The gRPC address of the server to measure; one that is started here is stopped again."""
    if url:
        yield url
        return
    with Server(repository, config_name=config_name or None, env=environment) as server:
        yield server.grpc


def _fail(message: str) -> NoReturn:
    Console(stderr=True, highlight=False).print(f"error: {message}", markup=False, style="red", soft_wrap=True)
    raise typer.Exit(1)
