"""EPD's experiments, simulated: MiniCPM-V-2.6-shaped on eight A100, requests of 2 and 4 images of 4032 x 3024."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from common import curves, mean_ttft, plt, profile, publish, save, simulate, table
from epd_scheduler.config import SchedulerConfig
from epd_scheduler.metrics_summary import SLO, attainment, goodput
from epd_scheduler.simulation.engine import Run
from epd_scheduler.simulation.images import Tiles
from epd_scheduler.simulation.roofline import MODELS
from epd_scheduler.simulation.topology import topology
from epd_scheduler.workload import Kind, Mix, RequestSpec, generate

REQUESTS = 200
TILE = 64  # rows of a slice
TTFT_RATE = 0.25  # requests a second of the paper's TTFT experiment
SLOS = {2: SLO(1.40, 0.04), 4: SLO(2.80, 0.04)}  # the paper's for two images; twice its TTFT for four


@dataclasses.dataclass(frozen=True)
class Scheme:
    instances: str
    overlap: str
    c: int  # encoder batch, in rows


ALL_TILES = 64 * TILE  # the whole request on one encoder
SCHEMES = {
    "aggregated": Scheme("8EPD", "none", ALL_TILES),  # vLLM, data parallel
    "PD": Scheme("7EP1D", "none", ALL_TILES),  # DistServe: the encoder is with prefill
    "EPD, no IRP": Scheme("5E2P1D", "none", ALL_TILES),
    "EPD": Scheme("5E2P1D", "none", 4 * TILE),  # the 20 tiles of two images over five encoders
    "EPD, single tiles": Scheme("5E2P1D", "none", TILE),
    "EPD + overlap": Scheme("5E2P1D", "full", 4 * TILE),  # this project's default
}


def run(scheme: Scheme, specs: Sequence[RequestSpec]) -> Run:
    scheduler = SchedulerConfig(overlap=scheme.overlap, encode_tokens=scheme.c, token_budget=4096, max_rows=256)  # type: ignore[arg-type]
    return simulate(
        specs,
        topology(scheme.instances),
        profile("minicpm-v-2.6-a100"),
        Tiles(rows=TILE, most=9),
        scheduler,
        kv_blocks=40000,
        embedding_blocks=3000,  # the paper's MM cache
    )


def workload(images: int, rate: float) -> list[RequestSpec]:
    kind = Kind(
        name="image",
        share=1,
        text_tokens=(22, 22),
        output_tokens=(10, 10),
        images=(images, images),
        sizes=((4032, 3024),),
    )
    return generate(Mix("synthetic", (kind,)), rate=rate, count=REQUESTS)


def main() -> None:
    calm = {(n, images): run(s, workload(images, TTFT_RATE)) for n, s in SCHEMES.items() for images in SLOS}
    ttft = {key: mean_ttft(value.results) for key, value in calm.items()}
    rows = []
    for name in SCHEMES:
        cells = [[f"{ttft[name, i]:.3f}", f"{ttft[name, i] / ttft['PD', i] - 1:+.0%}"] for i in SLOS]
        rows.append([name, SCHEMES[name].instances, *cells[0], *cells[1]])
    head = ["scheme", "instances", "2 images, TTFT (s)", "against PD", "4 images, TTFT (s)", "against PD"]
    publish("epd-ttft", table(head, rows))
    attainments({images: ttft["PD", images] for images in SLOS})
    memory()


def attainments(alone: dict[int, float]) -> None:
    """`alone` is the TTFT of PD at low load: an SLO just below it is one that only parallel encoding can meet."""
    rates = (2, 6, 10, 14, 18, 22)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
    rows: dict[str, list[str]] = {name: [name] for name in SCHEMES}

    def met(name: str, images: int, rate: float, slo: SLO) -> float:
        return attainment(run(SCHEMES[name], workload(images, rate)).results, {"image": slo})

    for axis, (images, slo) in zip(axes, SLOS.items(), strict=True):
        shown = [rate / (images / 2) for rate in rates]
        series = {name: (shown, [met(name, images, rate, slo) for rate in shown]) for name in SCHEMES}
        curves(series, axis, title=f"{images} images", xlabel="requests/s", ylabel="SLO attainment", ylim=(0, 1.02))
        for limit in (slo, SLO(0.9 * alone[images], slo.tpot_s)):
            for name in SCHEMES:
                found = goodput(
                    lambda rate, name=name, images=images, limit=limit: met(name, images, rate, limit),
                    start=4.0,
                    precision=0.1,
                )
                rows[name].append(f"{found:.1f}")
    save(figure, "epd_attainment")
    head = [f"{i} images, TTFT {s:.2f} s" for i, slo in SLOS.items() for s in (slo.ttft_s, 0.9 * alone[i])]
    publish("epd-goodput", table(["goodput (requests/s)", *head], list(rows.values())))


def memory() -> None:
    """Weights of an encoder instance beside those of an instance that also holds the language model."""
    rows = []
    for name in ("minicpm-v-2.6", "internvl2-8b", "internvl2-26b"):
        shape = MODELS[name]
        vision, rest = shape.vision_parameters * 2e-9, (shape.parameters + 2 * shape.vocabulary * shape.hidden) * 2e-9
        rows.append([shape.name, f"{vision + rest:.1f}", f"{vision:.1f}", f"{-rest / (vision + rest):+.0%}"])
    publish("epd-memory", table(["model", "all weights (GB)", "encoder (GB)", "change"], rows))


if __name__ == "__main__":
    main()
