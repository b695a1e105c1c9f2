"""`make bench-validate`: the simulator against the real server of this host, scenario by scenario.

The set-up of `benchmarks/overlap.py`: the 118 M checkpoint in bfloat16, the encoder on one core, the language instance
on the other. Server, orchestrator and load generator run on the encoder's core, as there, so that nothing but its own
work runs on the language core; the load generator comes first there, for it stands for clients elsewhere. Costs of
plans and the time around them are measured on the same servers, just before the load. Then the very same requests are
simulated with the same configuration, and nothing is adjusted.

With `--emulated`, emulated workers take the place of both cores: 5E1P2D with a GPU's profile, the real orchestrator.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import yaml
from epd_client import bench
from epd_client import profile_builder as builder
from epd_client.client import Client
from epd_client.payload import TextMaker
from epd_client.profiling import Profiler, Samples
from epd_scheduler.config import Config, parse
from epd_scheduler.metrics_summary import Summary, summarise
from epd_scheduler.profile import Profile, load_profile
from epd_scheduler.simulation.devices import Timing
from epd_scheduler.simulation.engine import Simulation
from epd_scheduler.simulation.images import Grid
from epd_scheduler.simulation.requests import Template
from epd_scheduler.simulation.topology import topology
from epd_scheduler.workload import Kind, Mix, RequestSpec, generate, load_mix

from benchmarks import calibration, overlap, quiet, validation
from benchmarks.orders import RPS
from benchmarks.overlap import BUILD, checkpoint, host
from benchmarks.papers.common import publish
from benchmarks.servers import ROOT, ahead, configuration, serve
from benchmarks.validation import Comparison, Measured, Setup

SEED = 1
MIX = ROOT / "deploy" / "workloads" / "two-core.yaml"
VISION = Grid(most=1280)  # of the checkpoint
CORES = {
    "1E1PD": overlap.CORES,
    "1E1P1D": {"encoder": "0", "prefill": "1", "decode": "0"},  # for text alone: the encoder is idle
}
FCFS = "order: fcfs, token_budget: 256"


@dataclass(frozen=True)
class Scenario:
    """A load on a server. Scenarios with the same `scheduler` and `topology` that follow each other share a server."""

    name: str
    mix: Mix
    rate: float
    scheduler: str = FCFS  # YAML
    topology: str = "1E1PD"

    def specs(self, seconds: float) -> list[RequestSpec]:
        return generate(self.mix, rate=self.rate, count=max(2, round(self.rate * seconds)), seed=SEED)


def scenarios() -> list[Scenario]:
    """Orders, overlap, budgets, kinds of requests, rates and topologies, in ten scenarios on six servers."""
    mix = load_mix(MIX)
    text, image, images = (Mix(kind.name, (kind,)) for kind in mix.kinds)
    four = Mix("four images", (msgspec.structs.replace(images.kinds[0], images=(4, 4)),))
    return [
        Scenario("text, low rate", text, 1.0),
        Scenario("text, high rate", text, 3.0),
        Scenario("one image", image, 1.0),
        Scenario("eight images", images, 0.2),
        Scenario("mix", mix, 0.6),
        Scenario("mix, rps, B = 64", mix, 0.8, f"order: rps, token_budget: 64, {RPS}"),
        Scenario("mix, edf", mix, 0.8, "order: edf, token_budget: 256"),
        Scenario("four images, overlap none", four, 0.3, f"{FCFS}, overlap: none"),
        Scenario("one image, overlap intra", image, 1.5, f"{FCFS}, overlap: intra"),
        Scenario("text, 1E1P1D", text, 2.0, topology="1E1P1D"),
    ]


class Probes:
    """Measures what plans cost on a running server, and what is around them."""

    def __init__(self, url: str, config: Config, text: TextMaker) -> None:
        self.model, self.layout = builder.read_layout(Path(config.model))
        self._profiler = Profiler(url, config, self.layout, text)

    def costs(self) -> Samples:
        return self._profiler.collect(1, lambda what, *_: print(f"  {what}", end="\033[K\r", flush=True))

    def timing(self, count: int = 13) -> Timing:
        """Over one channel, whose first request also connects it and does not count."""
        kinds = ((66, ()), (16, ((448, 448),)))
        specs = [
            RequestSpec(at=1.0 * index, kind="probe", text_tokens=tokens, output_tokens=2, images=images)
            for index, (tokens, images) in zip(range(count), itertools.cycle(kinds))
        ]
        return calibration.timing(self._profiler.send(specs)[1:])


def measure(chosen: Sequence[Scenario], seconds: float, wait_s: float) -> Measured:
    """Run the scenarios; on each server the probes run first."""
    model = checkpoint("bfloat16")
    samples, timings = defaultdict[str, list[Samples]](list), dict[str, Timing]()
    runs = dict[str, bench.Run]()
    for (scheduler, where), group in itertools.groupby(chosen, lambda each: (each.scheduler, each.topology)):
        text = configuration(model, "bfloat16", scheduler)
        with serve(text, where, cores=CORES[where]) as running, ahead():
            maker = _text_maker(running.grpc)
            probes = Probes(running.grpc, parse(yaml.safe_load(text)), maker)
            samples[where].append(probes.costs())
            timings[where] = probes.timing()
            for scenario in group:
                quiet.wait(wait_s)
                runs[scenario.name] = _load(running.grpc, scenario, seconds, maker)
    setups = {
        where: Setup(tuple(samples[where]), made.intake_s, made.exchange_s, made.response_s)
        for where, made in timings.items()
    }
    return Measured(host(), setups, runs)


def compare(measured: Measured, chosen: Sequence[Scenario], seconds: float) -> list[Comparison]:
    """Simulate what was measured."""
    model = checkpoint("bfloat16")
    template, made = calibration.template(model), list[Comparison]()
    for scenario in chosen:
        config = parse(yaml.safe_load(configuration(model, "bfloat16", scenario.scheduler)))
        setup = measured.setups[scenario.topology]
        profile = _profile(setup.samples, config)
        simulate = partial(_simulate, scenario, seconds, config, setup.timing, template)
        made.append(validation.compare(scenario.name, measured.runs[scenario.name], profile, simulate))
    return made


GPU_PROFILE = ROOT / "deploy" / "profiles" / "qwen2.5-vl-7b-h100.yaml"
GPU_POOLS = {"kv": 8192, "embedding": 4096}
_TEXT = Kind(name="text", share=0.6, text_tokens=(16, 1024), output_tokens=(16, 64))
_IMAGES = Kind(
    name="images", share=0.4, text_tokens=(16, 64), output_tokens=(16, 64), images=(1, 4), sizes=((1024, 1024),)
)
EMULATED = [
    Scenario(
        f"emulated 5E1P2D, {rate:g}/s",
        Mix("emulated", (_TEXT, _IMAGES)),
        rate,
        "order: fcfs, token_budget: 2048, max_rows: 256",
        "5E1P2D",
    )
    for rate in (3.0, 6.0)
]


def emulated(seconds: float, wait_s: float) -> list[Comparison]:
    """The real server with emulated workers beside the simulator, both with the same profile."""
    model, profile = checkpoint("bfloat16"), load_profile(GPU_PROFILE)
    text = configuration(model, "bfloat16", EMULATED[0].scheduler, **GPU_POOLS)
    config, template, made = parse(yaml.safe_load(text)), calibration.template(model), list[Comparison]()
    with serve(text, EMULATED[0].topology, emulate=GPU_PROFILE) as running, ahead():
        maker = _text_maker(running.grpc)
        timing = Probes(running.grpc, config, maker).timing()
        for scenario in EMULATED:
            quiet.wait(wait_s)
            run = _load(running.grpc, scenario, seconds, maker)
            simulate = partial(_simulate, scenario, seconds, config, timing, template)
            made.append(validation.compare(scenario.name, run, profile, simulate))
    return made


def _text_maker(url: str) -> TextMaker:
    with Client(url) as client:
        return TextMaker.calibrate(client)


def _load(url: str, scenario: Scenario, seconds: float, text: TextMaker) -> bench.Run:
    print(f"{scenario.name}: {seconds:.0f} s at {scenario.rate:g} requests/s", flush=True)
    mix = scenario.mix
    specs = scenario.specs(seconds)
    run = bench.measure(url, specs, text, label=scenario.name, workload=mix.name, slos=mix.slos, timeout_s=600.0)
    failed = [result.error for result in run.results if result.error]
    if failed:
        raise SystemExit(f"{scenario.name}: {len(failed)} requests failed, the first with: {failed[0]}")
    return run


def _profile(samples: Sequence[Samples], config: Config) -> Profile:
    """Fitted to all that the probes have measured, of images to those of the mix's size.

    Encoding is no smooth function of the size on a CPU: 144 rows were seen to take as long as 256.
    """
    model, layout = builder.read_layout(Path(config.model))
    mix = load_mix(MIX)
    units = {rows for kind in mix.kinds for size in kind.sizes for rows in layout(*size)}
    pooled = Samples()
    for each in samples:
        pooled.encode += [sample for sample in each.encode if units.issuperset(sample.rows)]
        pooled.prefill += each.prefill
        pooled.decode += each.decode
        pooled.migrate += each.migrate
    return builder.build(builder.fit(pooled.medians()), model, config, mix, layout, host(), apart=True)


def _simulate(
    scenario: Scenario,
    seconds: float,
    config: Config,
    timing: Timing,
    template: Template,
    profile: Profile,
    *,
    encode_spread: float = 0.0,
    forward_spread: float = 0.0,
    seed: int = 0,
) -> Summary:
    timing = msgspec.structs.replace(timing, encode_spread=encode_spread, forward_spread=forward_spread, seed=seed)
    simulation = Simulation(
        config, topology(scenario.topology), profile, vision=VISION, timing=timing, template=template
    )
    slos = scenario.mix.slos
    return summarise(simulation.run(scenario.specs(seconds), slos).results, slos)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the simulator with the real server of this host.")
    parser.add_argument("--seconds", type=float, default=60.0, help="of load in each scenario")
    parser.add_argument("--only", nargs="+", help="names of scenarios; all by default")
    parser.add_argument("--emulated", action="store_true", help="emulated workers in place of this host's cores")
    parser.add_argument("--again", action="store_true", help="simulate again what has been measured")
    parser.add_argument("--wait", type=float, default=30.0, help="most seconds to wait for an idle machine, each time")
    parser.add_argument("--out", type=Path, default=BUILD / "validate.json", help="what was measured")
    parser.add_argument("--publish", action="store_true", help="write the table into docs/results.md")
    args = parser.parse_args()
    if args.emulated:
        name, made = "validation-emulated", emulated(args.seconds, args.wait)
    else:
        chosen = [each for each in scenarios() if not args.only or each.name in args.only]
        if not args.again:
            os.sched_setaffinity(0, {0})  # server and load generator too: the language core computes alone
            validation.save(measure(chosen, args.seconds, args.wait), args.out)
        name, made = "validation", compare(validation.load(args.out), chosen, args.seconds)
    if args.publish:
        publish(name, validation.markdown(made))
    else:
        print(validation.markdown(made))


if __name__ == "__main__":
    main()
