"""`epd simulate`: a workload on a simulated deployment. What it needs is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

if TYPE_CHECKING:
    from epd_client.bench import Run

console = Console(highlight=False)


def simulate(
    scenario: Annotated[Path, typer.Argument(help="Deployment (YAML), e.g. of deploy/scenarios.")],
    workload: Annotated[Path, typer.Option(help="Mix of requests (YAML).")] = Path("deploy/workloads/heavy.yaml"),
    trace: Annotated[Path | None, typer.Option(help="Trace (JSON lines) in place of Poisson arrivals.")] = None,
    rate: Annotated[list[float] | None, typer.Option(help="Requests a second; may be given several times.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests at each rate.")] = 1000,
    goodput: Annotated[bool, typer.Option(help="Find the highest rate with >= 90 % SLO attainment.")] = False,
    slo_scale: Annotated[float, typer.Option(help="Factor of all SLOs.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed sends the same requests, here and in `epd bench`.")] = 0,
    label: Annotated[str, typer.Option(help="Name in tables and plots; the scenario's by default.")] = "",
    out: Annotated[Path, typer.Option(help="Results (JSON), for `epd plot`.")] = Path("build/bench/simulated.json"),
) -> None:
    """Simulate a workload with the server's own scheduler and cost models in place of workers."""
    from epd_scheduler import metrics_summary
    from epd_scheduler.config import ConfigError
    from epd_scheduler.profile import ProfileError
    from epd_scheduler.simulation.engine import SimulationError
    from epd_scheduler.simulation.scenario import load_scenario
    from epd_scheduler.simulation.topology import TopologyError
    from epd_scheduler.workload import RequestSpec, WorkloadError, generate, load_mix, load_trace

    from epd_client import bench

    runs: list[Run] = []
    try:
        deployment = load_scenario(scenario)
        mix = load_mix(workload)
        slos = {kind: slo.scaled(slo_scale) for kind, slo in mix.slos.items()}

        def at(specs: list[RequestSpec]) -> float:
            results = deployment.simulate(specs, slos).results
            run = bench.Run(
                label=f"{label or deployment.scenario.name} (simulated)",
                workload=mix.name,
                rate=bench.sent_rate(specs),
                slos=slos,
                summary=metrics_summary.summarise(results, slos),
                results=results,
                seed=seed,
            )
            console.print(bench.table(run))
            runs.append(run)
            return run.summary.overall.attainment

        if trace:
            at(load_trace(trace))
        for each in rate or ([] if trace or goodput else [1.0]):
            at(generate(mix, rate=each, count=requests, seed=seed))
        if goodput:
            start = (rate or [1.0])[-1]
            console.print(bench.find_goodput(at, mix, start=start, count=requests, seed=seed))
    except (ConfigError, ProfileError, SimulationError, TopologyError, WorkloadError) as error:
        _fail(str(error))
    bench.save(runs, out)
    console.print(f"results: {out}; plots of one or several such files: epd plot {out}", soft_wrap=True)


def _fail(message: str) -> NoReturn:
    Console(stderr=True, highlight=False).print(f"error: {message}", markup=False, style="red", soft_wrap=True)
    raise typer.Exit(1)
