"""RPS-Serve's experiments, simulated: Qwen2.5-VL-7B-shaped on one A100 that does everything; only the order differs.

As in the paper, which builds on vLLM, a request is encoded before it is prefilled; the last scheme overlaps both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from common import curves, plt, profile, publish, save, simulate, table
from epd_scheduler.config import SchedulerConfig, SLOConfig
from epd_scheduler.impact import ImpactEstimator
from epd_scheduler.metrics_summary import RequestResult, goodput
from epd_scheduler.request import CLASSES
from epd_scheduler.simulation.engine import Run
from epd_scheduler.simulation.images import Grid
from epd_scheduler.simulation.topology import topology
from epd_scheduler.training import train
from epd_scheduler.workload import Kind, Mix, RequestSpec, generate

SCHEMES = {"fcfs": ("fcfs", "none"), "edf": ("edf", "none"), "rps": ("rps", "none"), "rps + overlap": ("rps", "full")}
REQUESTS = 500
GOODPUT_SECONDS = 200  # of arrivals at each rate that the search for the goodput tries
BUDGET, C = 512, 256
KV_BLOCKS = 16_384  # 262,144 tokens, 15 GB: what weights and activations leave of 40 GB
SLO = SLOConfig(floor=0.5, scale=5.0)  # a request's deadline: five times its time alone, half a second at least

TEXT = Kind(name="text", share=1, text_tokens=(16, 2048), output_tokens=(16, 256))
IMAGE = Kind(
    name="image", share=0, text_tokens=(8, 64), output_tokens=(16, 128), images=(1, 1), sizes=((640, 480), (1024, 1024))
)
VIDEO = Kind(name="video", share=0, text_tokens=(8, 64), output_tokens=(16, 128), images=(16, 120), sizes=((448, 448),))


def mix(name: str, text: float, image: float, video: float) -> Mix:
    shares = zip((TEXT, IMAGE, VIDEO), (text, image, video), strict=True)
    return Mix(name, tuple(msgspec.structs.replace(kind, share=share) for kind, share in shares if share))


MIXES = {
    "text only": mix("text", 1, 0, 0),
    "light": mix("light", 0.85, 0.12, 0.03),
    "heavy": mix("heavy", 0.6, 0.25, 0.15),
}
RATES = {"text only": 8.0, "light": 3.0, "heavy": 1.1}  # requests/s: each about 70-80 % of what the GPU can do


class Bench:
    """The model with its classifier, trained on the heavy mix as the profiler does."""

    def __init__(self) -> None:
        model = profile("qwen2.5-vl-7b-a100")
        self.estimator = ImpactEstimator(model, SchedulerConfig(encode_tokens=C, token_budget=BUDGET, overlap="none"))
        sample = generate(MIXES["heavy"], rate=1.0, count=2000, seed=1)
        centres = train([self.estimator.estimate(*self._size(spec)) for spec in sample])
        self.model = msgspec.structs.replace(model, centres=centres)

    @staticmethod
    def _size(spec: RequestSpec) -> tuple[int, int, list[int]]:
        rows = [rows for size in spec.images for rows in Grid().units(*size)]
        return sum(rows) + spec.text_tokens, spec.output_tokens, rows

    def run(self, scheme: str, specs: Sequence[RequestSpec], memory: float = 1.0) -> Run:
        order, overlap = SCHEMES[scheme]
        scheduler = SchedulerConfig(
            order=order,  # type: ignore[arg-type]
            overlap=overlap,  # type: ignore[arg-type]
            encode_tokens=C,
            token_budget=BUDGET,
            max_rows=256,
            slo=SLO,
        )
        return simulate(
            specs,
            topology("1EPD"),
            self.model,
            Grid(),
            scheduler,
            kv_blocks=int(KV_BLOCKS * memory),
            embedding_blocks=4096,
        )

    def lateness(self, specs: Sequence[RequestSpec], results: Sequence[RequestResult], scale: float) -> list[float]:
        """Seconds after the deadline of the first token; at most zero if it was met."""
        alone = [self.estimator.estimate(*self._size(spec)).prefill_s for spec in specs]
        limits = [scale * max(SLO.floor, SLO.scale * seconds) for seconds in alone]
        return [result.ttft_s - limit for result, limit in zip(results, limits, strict=True)]


def main() -> None:
    bench = Bench()
    loads = {name: generate(each, rate=RATES[name], count=REQUESTS) for name, each in MIXES.items()}
    runs = {(name, scheme): bench.run(scheme, specs) for name, specs in loads.items() for scheme in SCHEMES}
    mixes(bench, loads, runs)
    preemptions(bench, loads["heavy"])
    memory(bench, loads["heavy"])
    slo_scale(bench, loads["heavy"], runs)


def mixes(bench: Bench, loads: dict[str, list[RequestSpec]], runs: dict[tuple[str, str], Run]) -> None:
    rows = []
    for (name, scheme), run in runs.items():
        late = bench.lateness(loads[name], run.results, 1.0)
        for klass in (*CLASSES, "all"):
            chosen = [i for i, r in enumerate(run.results) if klass in (r.klass, "all")]
            if not chosen:
                continue
            ttft = [run.results[i].ttft_s for i in chosen]
            normalised = np.mean([run.results[i].e2e_s / run.results[i].output_tokens for i in chosen])
            missed = [late[i] for i in chosen if late[i] > 0]
            cells = [f"{np.mean(ttft):.3f}", f"{np.percentile(ttft, 90):.3f}", f"{np.percentile(ttft, 99):.3f}"]
            cells += [f"{normalised:.3f}", f"{len(missed) / len(chosen):.1%}", f"{np.mean(missed or [0.0]):.1f}"]
            rows.append([name, scheme, klass, str(len(chosen)), *cells])
    head = [
        "mix",
        "scheme",
        "class",
        "requests",
        "TTFT mean (s)",
        "P90",
        "P99",
        "s an output token",
        "SLO missed",
        "by (s)",
    ]
    publish("rps-mixes", table(head, rows))


def preemptions(bench: Bench, specs: list[RequestSpec]) -> None:
    """With an eighth of the memory, where there is something to preempt."""
    rows = []
    for scheme in SCHEMES:
        results = bench.run(scheme, specs, 0.125).results
        counts = [sum(r.preemptions for r in results if r.klass == klass) for klass in CLASSES]
        seconds = [sum(r.preempted_s for r in results if r.klass == klass) for klass in CLASSES]
        rows.append([scheme, *(str(count) for count in counts), *(f"{each:.0f}" for each in seconds)])
    publish("rps-preemptions", table(["scheme", *CLASSES, *(f"{k}, seconds" for k in CLASSES)], rows))


def memory(bench: Bench, specs: list[RequestSpec]) -> None:
    shares = (1.0, 0.5, 0.25, 0.125)  # the last holds one of the longest videos
    figure, axes = plt.subplots(1, 3, figsize=(10, 3), sharey=True, layout="constrained")
    found = {(scheme, share): bench.run(scheme, specs, share).results for scheme in SCHEMES for share in shares}
    rows = []
    for share in shares:
        cells = [f"{_ttft(found[scheme, share], klass):.2f}" for klass in CLASSES for scheme in SCHEMES]
        rows.append([f"{share:.2%}".replace(".00", ""), *cells])
    for axis, klass in zip(axes, CLASSES, strict=True):
        series = {n: ([100 * s for s in shares], [_ttft(found[n, s], klass) for s in shares]) for n in SCHEMES}
        curves(series, axis, title=klass, xlabel="KV memory (%)", xscale="log", yscale="log")
    axes[0].set_ylabel("mean TTFT (s)")
    save(figure, "rps_memory")
    publish(
        "rps-memory", table(["KV memory", *(f"{klass}, {scheme}" for klass in CLASSES for scheme in SCHEMES)], rows)
    )


def slo_scale(bench: Bench, specs: list[RequestSpec], runs: dict[tuple[str, str], Run]) -> None:
    rows = []
    for scale in (0.5, 1.0, 2.0):
        for scheme in SCHEMES:
            results = runs["heavy", scheme].results
            late = bench.lateness(specs, results, scale)
            cells = []
            for klass in CLASSES:
                mine = [each for each, result in zip(late, results, strict=True) if result.klass == klass]
                missed = [each for each in mine if each > 0]
                cells.append(f"{len(missed) / len(mine):.1%} by {np.mean(missed or [0.0]):.1f} s")
            rows.append(
                [
                    f"{scale:g}",
                    scheme,
                    *cells,
                    f"{goodput(_attainment(bench, scheme, scale), start=1.0, precision=0.1):.2f}",
                ]
            )
    publish("rps-slo", table(["SLO scale", "scheme", *CLASSES, "goodput (requests/s)"], rows))


def _attainment(bench: Bench, scheme: str, scale: float) -> Callable[[float], float]:
    def at(rate: float) -> float:
        specs = generate(MIXES["heavy"], rate=rate, count=int(GOODPUT_SECONDS * rate))
        late = bench.lateness(specs, bench.run(scheme, specs).results, scale)
        return float(np.mean([each <= 0 for each in late]))

    return at


def _ttft(results: Sequence[RequestResult], klass: str) -> float:
    return float(np.mean([result.ttft_s for result in results if result.klass == klass]))


if __name__ == "__main__":
    main()
