"""From measured plans to a profile: cost models, sizes, classes, and how well it all predicts."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from epd_backend import families
from epd_scheduler.config import Config
from epd_scheduler.fitting import Fit, fit_encode, fit_forward, fit_migrate
from epd_scheduler.impact import Impact, ImpactEstimator
from epd_scheduler.profile import EncodeCost, ForwardCost, MigrateCost, Profile
from epd_scheduler.training import train
from epd_scheduler.workload import Mix, RequestSpec, generate
from rich.table import Table

from epd_client.profiling import Layout, Profiler, Samples, Step

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TRAINING_REQUESTS = 1000


@dataclass(frozen=True)
class Fits:
    """All cost models beside what they were fitted to."""

    encode: Fit[EncodeCost]
    prefill: Fit[ForwardCost]  # the same cost as `decode`, on prompt chunks
    decode: Fit[ForwardCost]
    migrate: Fit[MigrateCost] | None  # None: prefill and decode share a device

    @property
    def named(self) -> dict[str, Fit[Any]]:
        """By name, those that there are."""
        every: dict[str, Fit[Any] | None] = {
            "encode": self.encode,
            "prefill": self.prefill,
            "decode": self.decode,
            "migrate": self.migrate,
        }
        return {name: fit for name, fit in every.items() if fit is not None}


@dataclass(frozen=True)
class Prediction:
    """A request that ran alone: its estimated and its measured time to first token, in seconds."""

    kind: str
    estimated: float
    measured: float

    @property
    def error(self) -> float:
        """Relative; positive: estimated too high."""
        return self.estimated / self.measured - 1


def read_layout(checkpoint: Path) -> tuple[dict[str, Any], Layout]:
    """config.json of a checkpoint, and the embedding rows of its images. Raises OSError, UnsupportedModelError."""
    config = json.loads((checkpoint / "config.json").read_text())
    family, preprocessor = families.of(config), families.read_preprocessor(checkpoint)
    return config, lambda width, height: family.layout(width, height, preprocessor, config).units


def kv_bytes_token(model: Mapping[str, Any], dtype: str) -> int:
    """Bytes of keys and values of one token over all layers, from config.json."""
    text = model.get("text_config", model)
    heads = text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    kv_heads = text.get("num_key_value_heads") or heads
    return int(text["num_hidden_layers"] * 2 * kv_heads * head_dim * DTYPE_BYTES[dtype])


def embedding_bytes_row(model: Mapping[str, Any], dtype: str) -> int:
    """Bytes of one embedding row, from config.json."""
    return int(model.get("text_config", model)["hidden_size"] * DTYPE_BYTES[dtype])


def fit(samples: Samples) -> Fits:
    """Fit all cost models; prefill chunks and decode steps are forwards of one executor and share a model."""
    forward = fit_forward([*samples.prefill, *samples.decode])
    split = len(samples.prefill)
    return Fits(
        fit_encode(samples.encode),
        Fit(forward.cost, forward.measured[:split], forward.predicted[:split]),
        Fit(forward.cost, forward.measured[split:], forward.predicted[split:]),
        fit_migrate(samples.migrate) if samples.migrate else None,
    )


def build(
    fits: Fits, model: Mapping[str, Any], config: Config, mix: Mix, layout: Layout, device: str, *, apart: bool
) -> Profile:
    """The profile, its classes trained on requests of a mix. `apart` as in `ImpactEstimator.estimate`.

    Raises ProfileError.
    """
    errors = ", ".join(f"{name} {fit.mean_error:.1%} (P90 {fit.p90_error:.1%})" for name, fit in fits.named.items())
    profile = Profile(
        model=Path(config.model).name,
        device=device,
        encode=fits.encode.cost,
        forward=fits.prefill.cost,
        kv_bytes_token=kv_bytes_token(model, config.dtype),
        embedding_bytes_row=embedding_bytes_row(model, config.dtype),
        migrate=fits.migrate.cost if fits.migrate else MigrateCost(),
        source=f"measured by `epd profile` on {datetime.date.today()}, {config.dtype}; mean relative error of the "
        f"cost models: {errors}; classes trained on the mix '{mix.name}'",
    )
    specs = generate(mix, rate=1.0, count=TRAINING_REQUESTS)
    estimator = ImpactEstimator(profile, config.scheduler)
    return msgspec.structs.replace(profile, centres=train([impact(spec, estimator, layout, apart) for spec in specs]))


def impact(spec: RequestSpec, estimator: ImpactEstimator, layout: Layout, apart: bool) -> Impact:
    """Estimated impact of a workload's request; the few tokens of a chat template are left out."""
    units = _units(spec, layout)
    return estimator.estimate(spec.text_tokens + sum(units), spec.output_tokens, units, apart=apart)


def _units(spec: RequestSpec, layout: Layout) -> list[int]:
    """Embedding rows of each encoder unit of a request's images."""
    return [rows for width, height in spec.images for rows in layout(width, height)]


def check(
    profiler: Profiler,
    estimator: ImpactEstimator,
    layout: Layout,
    specs: Sequence[RequestSpec],
    step: Step,
    *,
    apart: bool,
) -> list[Prediction]:
    """Send requests one at a time and compare TTFT with what the estimator says of them. Raises EpdError."""
    predictions = []
    for done, spec in enumerate(specs):
        step(f"check: {spec.kind}", done, len(specs))
        (seen,) = profiler.send([msgspec.structs.replace(spec, at=0.0, output_tokens=1)])
        estimated = estimator.estimate(seen.input_tokens, 1, _units(spec, layout), apart=apart).prefill_s
        assert seen.timeline is not None
        measured = seen.timeline.ttft_s
        assert measured is not None
        predictions.append(Prediction(spec.kind, estimated, measured))
    step("check", len(specs), len(specs))
    return predictions


def this_host(note: str) -> str:
    """This machine in words."""
    model = platform.processor() or platform.machine()
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} CPU cores, {note}"


def fit_table(fits: Fits) -> Table:
    """Samples and errors of each cost model."""
    table = Table("cost model", box=None, pad_edge=False)
    for head in ("samples", "shortest", "longest", "mean error", "P90 error"):
        table.add_column(head, justify="right")
    for name, each in fits.named.items():
        times = (f"{value * 1e3:.2f} ms" for value in (each.measured.min(), each.measured.max()))
        table.add_row(name, str(len(each.measured)), *times, f"{each.mean_error:.1%}", f"{each.p90_error:.1%}")
    return table


def check_table(predictions: Sequence[Prediction]) -> Table:
    """The estimator's relative error by kind of request, and of all."""
    table = Table("TTFT alone", box=None, pad_edge=False)
    for head in ("requests", "measured mean", "error: mean", "absolute", "absolute P90"):
        table.add_column(head, justify="right")
    for kind in [*dict.fromkeys(p.kind for p in predictions), "all"]:
        chosen = [p for p in predictions if kind in (p.kind, "all")]
        errors = np.array([p.error for p in chosen])
        table.add_row(
            kind,
            str(len(chosen)),
            f"{np.mean([p.measured for p in chosen]) * 1e3:.1f} ms",
            f"{errors.mean():+.1%}",
            f"{np.abs(errors).mean():.1%}",
            f"{np.percentile(np.abs(errors), 90):.1%}",
        )
    return table


def draw(fits: Fits, predictions: Sequence[Prediction], directory: Path) -> list[Path]:
    """Plots of the fits and of the estimates, if matplotlib is there. Returns their paths."""
    try:
        from epd_client import plots
    except ImportError:
        return []
    panels = {name: (each.measured.tolist(), each.predicted.tolist()) for name, each in fits.named.items()}
    figures = {"fits": plots.fits(panels, "cost model")}
    if predictions:
        kinds = dict.fromkeys(prediction.kind for prediction in predictions)
        points = {kind: [(p.measured, p.estimated) for p in predictions if p.kind == kind] for kind in kinds}
        figures["estimates"] = plots.estimates(points)
    paths = []
    for name, figure in figures.items():
        paths.append(directory / f"{name}.png")
        plots.save(figure, paths[-1])
    return paths


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
