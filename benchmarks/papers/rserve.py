"""RServe's experiments, simulated: Qwen2.5-VL-72B-shaped on H100, one encoder and four pipeline stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np
from common import curves, mean_ttft, plt, profile, prompt_tokens_s, publish, save, simulate, table
from epd_scheduler.config import SchedulerConfig
from epd_scheduler.metrics_summary import SLO, attainment
from epd_scheduler.profile import Profile
from epd_scheduler.simulation.devices import Busy
from epd_scheduler.simulation.engine import Run
from epd_scheduler.simulation.images import Grid
from epd_scheduler.simulation.topology import topology
from epd_scheduler.workload import Kind, Mix, RequestSpec, generate

REQUESTS = 400
SIZES = {"1K": ((1024, 1024), 4), "2K": ((2048, 2048), 2)}  # pixels and number of images of a request
RATES = {"1K": (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0), "2K": (0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.85, 1.0)}
CALM = 4  # the first so many rates are far from saturation


@dataclasses.dataclass(frozen=True)
class Scheme:
    instances: str
    overlap: str


SCHEMES = {
    "aggregated": Scheme("1EPD", "none"),  # gLLM
    "gllm-epd": Scheme("1E1PD", "none"),
    "intra": Scheme("1E1PD", "intra"),
    "full": Scheme("1E1PD", "full"),  # RServe
}


def run(
    scheme: Scheme,
    specs: Sequence[RequestSpec],
    model: Profile,
    *,
    stages: int = 4,
    c: int = 1024,
    record: bool = False,
) -> Run:
    scheduler = SchedulerConfig(overlap=scheme.overlap, encode_tokens=c, token_budget=2048, max_rows=256)  # type: ignore[arg-type]
    instances = topology(scheme.instances, stages=stages)
    return simulate(specs, instances, model, Grid(), scheduler, kv_blocks=24000, embedding_blocks=4096, record=record)


def workload(size: tuple[int, int], images: int, rate: float, count: int = REQUESTS) -> list[RequestSpec]:
    """As in the paper the first token is what counts: the output is one token."""
    kind = Kind(
        name="image", share=1, text_tokens=(50, 200), output_tokens=(1, 1), images=(images, images), sizes=(size,)
    )
    return generate(Mix("mmmu-like", (kind,)), rate=rate, count=count)


def without_preprocessing(model: Profile) -> Profile:
    """As if all preprocessing of images were done on idle CPU cores before the requests arrive."""
    seconds = 40e-9 * 28 * 28
    return msgspec.structs.replace(
        model, encode=msgspec.structs.replace(model.encode, per_row=model.encode.per_row - seconds)
    )


def main() -> None:
    model = profile("qwen2.5-vl-72b-h100")
    runs = {
        (name, size, rate): run(scheme, workload(*SIZES[size], rate), model)
        for size in SIZES
        for rate in RATES[size]
        for name, scheme in SCHEMES.items()
    }
    rates(runs)
    slo(runs)
    comparison(runs, model)
    inter_request(model)
    batch_size(model)
    single_gpu()
    occupancy(model)


def rates(runs: dict[tuple[str, str, float], Run]) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex="col", layout="constrained")
    for column, size in enumerate(SIZES):
        rows = []
        for rate in RATES[size]:
            times = [mean_ttft(runs[name, size, rate].results) for name in SCHEMES]
            tokens = [prompt_tokens_s(runs[name, size, rate]) for name in SCHEMES]
            rows.append([f"{rate}", *(f"{t:.2f}" for t in times), *(f"{t:,.0f}" for t in tokens)])
        publish(f"rserve-rates-{size}", table(["requests/s", *SCHEMES, *(f"{n}, tokens/s" for n in SCHEMES)], rows))
        ttft = {n: (RATES[size], [mean_ttft(runs[n, size, r].results) for r in RATES[size]]) for n in SCHEMES}
        tokens_s = {n: (RATES[size], [prompt_tokens_s(runs[n, size, r]) for r in RATES[size]]) for n in SCHEMES}
        curves(ttft, axes[0][column], title=size, yscale="log", ylabel="mean TTFT (s)")
        curves(tokens_s, axes[1][column], xlabel="requests/s", ylabel="prompt tokens/s")
    save(figure, "rserve_rates")


def slo(runs: dict[tuple[str, str, float], Run]) -> None:
    """Attainment averaged over all rates, which is the area below the curve of attainment against rate."""
    rows = []
    for size in SIZES:
        alone = mean_ttft(runs["gllm-epd", size, RATES[size][0]].results)
        for factor in (1.0, 1.25, 1.5, 2.0):
            limit = {"image": SLO(factor * alone)}
            met = {
                name: np.mean([attainment(runs[name, size, rate].results, limit) for rate in RATES[size]])
                for name in SCHEMES
            }
            cells = [f"{met[name]:.0%}" for name in SCHEMES]
            rows.append([f"{size}, {factor * alone:.2f} s", *cells, _change(met["full"] / met["gllm-epd"])])
    publish("rserve-slo", table(["images, SLO", *SCHEMES, "full / gllm-epd"], rows))


def comparison(runs: dict[tuple[str, str, float], Run], model: Profile) -> None:
    """The paper's relative numbers: TTFT where queues are short, throughput when all requests come at once."""
    rows = []
    for size in SIZES:
        ttft = {n: np.array([mean_ttft(runs[n, size, r].results) for r in RATES[size][:CALM]]) for n in SCHEMES}
        rows.append(_compared(f"{size}, as it is", ttft, model, size))
    bare = without_preprocessing(model)
    for size in SIZES:
        calm = [workload(*SIZES[size], rate) for rate in RATES[size][:CALM]]
        ttft = {n: np.array([mean_ttft(run(s, specs, bare).results) for specs in calm]) for n, s in SCHEMES.items()}
        rows.append(_compared(f"{size}, preprocessing elsewhere", ttft, bare, size))
    head = ["images", "gllm-epd / aggregated, TTFT", "full / gllm-epd, TTFT", "gllm-epd / aggregated, tokens/s"]
    publish("rserve-comparison", table([*head, "full / aggregated, tokens/s", "full, tokens/s"], rows))


def _compared(title: str, ttft: dict[str, np.ndarray], model: Profile, size: str) -> list[str]:
    flood = workload(*SIZES[size], 50.0)
    tokens = {name: prompt_tokens_s(run(SCHEMES[name], flood, model)) for name in ("aggregated", "gllm-epd", "full")}
    return [
        title,
        _change(np.mean(ttft["gllm-epd"] / ttft["aggregated"])),
        _change(np.mean(ttft["full"] / ttft["gllm-epd"])),
        _change(tokens["gllm-epd"] / tokens["aggregated"]),
        _change(tokens["full"] / tokens["aggregated"]),
        f"{tokens['full']:,.0f}",
    ]


def inter_request(model: Profile) -> None:
    """Batching across requests, which `intra` lacks, where C leaves less than a budget ready at a time."""
    rows = []
    for rate in (1.5, 2.0, 2.5, 2.75, 3.0, 50.0):
        specs = workload((896, 896), 4, rate)
        intra, full = (run(SCHEMES[scheme], specs, model) for scheme in ("intra", "full"))
        times = mean_ttft(intra.results), mean_ttft(full.results)
        tokens = prompt_tokens_s(intra), prompt_tokens_s(full)
        cells = [f"{times[0]:.2f}", f"{times[1]:.2f}", _change(times[0] / times[1])]
        cells += [f"{tokens[0]:,.0f}", f"{tokens[1]:,.0f}", _change(tokens[0] / tokens[1])]
        rows.append(["all at once" if rate == 50 else f"{rate:g}", *cells])
    head = ["requests/s", "intra, TTFT (s)", "full, TTFT (s)", "change", "intra, tokens/s", "full, tokens/s", "change"]
    publish("rserve-intra", table(head, rows))


def batch_size(model: Profile) -> None:
    """The sweep over C: large items gain nothing from batches, small ones do."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    rows = []
    cases = {"1024-token items": ((896, 896), 8, 0.4, 1024), "32-token items": ((224, 112), 64, 1.2, 32)}
    for axis, (name, (size, images, rate, item)) in zip(axes, cases.items(), strict=True):
        factors = [1, 2, 4, 8, 16, 32, 64] if item == 32 else [1, 2, 4, 8]
        specs, flood = workload(size, images, rate, 200), workload(size, images, 50.0, 200)
        found = [
            (run(SCHEMES["full"], specs, model, c=f * item), run(SCHEMES["full"], flood, model, c=f * item))
            for f in factors
        ]
        times = [mean_ttft(calm.results) for calm, _ in found]
        tokens = [prompt_tokens_s(busy) for _, busy in found]
        for factor, time, speed in zip(factors, times, tokens, strict=True):
            rows.append([name, f"{factor * item}", f"{time:.3f}", f"{time / min(times):.2f}", f"{speed:,.0f}"])
        curves(
            {"TTFT": ([f * item for f in factors], times)},
            axis,
            title=name,
            xlabel="C",
            xscale="log",
            ylabel="mean TTFT (s)",
        )
    publish("rserve-c", table(["items", "C", "mean TTFT (s)", "of the best", "tokens/s, all at once"], rows))
    save(figure, "rserve_c")


def single_gpu() -> None:
    """The language model on one GPU, an encoder beside it."""
    rows = []
    model = profile("qwen2.5-vl-7b-h100")
    for rate in (0.5, 1.0, 2.0, 3.0, 4.0):
        none, full = (
            mean_ttft(run(SCHEMES[name], workload(*SIZES["1K"], rate), model, stages=1).results)
            for name in ("gllm-epd", "full")
        )
        rows.append([f"{rate:g}", f"{none:.3f}", f"{full:.3f}", _change(full / none)])
    publish("rserve-single", table(["requests/s", "gllm-epd (s)", "full (s)", "change"], rows))


def occupancy(model: Profile) -> None:
    """What the stages do for a few requests: bubbles are white."""
    figure, axes = plt.subplots(len(SCHEMES), 1, figsize=(9, 8), sharex=True, layout="constrained")
    for axis, (name, scheme) in zip(axes, SCHEMES.items(), strict=True):
        busy = run(scheme, workload(*SIZES["1K"], 2.0, 6), model, record=True).busy
        _gantt(axis, [b for b in busy if b.what in ("encode", "forward")], name)
    axes[-1].set_xlabel("seconds")
    save(figure, "rserve_occupancy")


def _gantt(axis: plt.Axes, busy: Sequence[Busy], title: str) -> None:
    lanes = sorted({(b.instance, b.stage) for b in busy}, key=lambda lane: (not lane[0].startswith("E"), lane))
    for b in busy:
        colour = "tab:cyan" if b.what == "encode" else "tab:orange"
        axis.broken_barh(
            [(b.start, b.end - b.start)],
            (lanes.index((b.instance, b.stage)) - 0.4, 0.8),
            color=colour,
            edgecolor="white",
        )
    names = ["encoder" if instance == "E0" else f"stage {stage}" for instance, stage in lanes]
    axis.set(title=title, yticks=range(len(lanes)), yticklabels=names)
    axis.invert_yaxis()


def _change(ratio: float) -> str:
    return f"{ratio - 1:+.0%}"


if __name__ == "__main__":
    main()
