"""Workloads: mixes of requests (YAML), Poisson arrivals, traces (JSON lines). For the load generator and the simulator.

A workload says how large requests are, not what is in them; the same seed gives the same workload everywhere.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from epd_scheduler.metrics_summary import SLO


class WorkloadError(ValueError):
    """A mix or trace cannot be used; the message names the file and the remedy."""


class Kind(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of request in a mix. Ranges are inclusive."""

    name: str
    share: float  # of all requests, relative to the other kinds' shares
    text_tokens: tuple[int, int]  # of the prompt, log-uniform: short ones are common, long ones rare
    output_tokens: tuple[int, int]  # log-uniform
    images: tuple[int, int] = (0, 0)  # images of a request, or frames of a video, uniform
    sizes: tuple[tuple[int, int], ...] = ()  # (width, height) in pixels; a request's images have one size
    slo: SLO = SLO()


class Mix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Kinds of requests and how common each is."""

    name: str
    kinds: tuple[Kind, ...]

    @property
    def slos(self) -> dict[str, SLO]:
        """By kind."""
        return {kind.name: kind.slo for kind in self.kinds}


class RequestSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One request of a workload."""

    at: float  # seconds from the start
    kind: str
    text_tokens: int
    output_tokens: int
    images: tuple[tuple[int, int], ...] = ()  # (width, height) in pixels


def load_mix(path: str | Path) -> Mix:
    """Read a mix. Raises WorkloadError."""
    try:
        mix = msgspec.yaml.decode(Path(path).read_bytes(), type=Mix)
    except (OSError, msgspec.DecodeError) as error:
        raise WorkloadError(f"{path}: {error}; see deploy/workloads for mixes that work") from error
    if not mix.kinds or not sum(kind.share for kind in mix.kinds) > 0 or min(kind.share for kind in mix.kinds) < 0:
        raise WorkloadError(f"{path}: the shares of the kinds must be at least 0, and one above")
    for kind in mix.kinds:
        ranges = {"text_tokens": kind.text_tokens, "output_tokens": kind.output_tokens}
        for name, (low, high) in ranges.items():
            if not 1 <= low <= high:
                raise WorkloadError(f"{path}: kind {kind.name}: '{name}' must be [low, high] with 1 <= low <= high")
        if not 0 <= kind.images[0] <= kind.images[1] or (kind.images[1] and not kind.sizes):
            raise WorkloadError(f"{path}: kind {kind.name}: 'images' must be [low, high], and images need 'sizes'")
    return mix


def generate(mix: Mix, *, rate: float, count: int, seed: int = 0) -> list[RequestSpec]:
    """`count` requests with Poisson arrivals of `rate` a second.

    The rate changes the times alone: with one seed, two rates send the same requests in the same order.
    """
    if rate <= 0:
        raise WorkloadError(f"the rate must be above 0 requests a second, not {rate}")
    gaps, body = (np.random.default_rng([seed, stream]) for stream in (0, 1))
    times = np.cumsum(gaps.exponential(1.0, count)) / rate
    shares = np.array([kind.share for kind in mix.kinds])
    chosen = body.choice(len(mix.kinds), count, p=shares / shares.sum())
    return [_draw(mix.kinds[index], float(at), body) for index, at in zip(chosen, times, strict=True)]


def load_trace(path: str | Path) -> list[RequestSpec]:
    """Read a trace, one request a line as JSON, in any order of time. Raises WorkloadError."""
    try:
        specs = msgspec.json.Decoder(RequestSpec).decode_lines(Path(path).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise WorkloadError(f"{path}: {error}; a line has the fields of RequestSpec, e.g. {_EXAMPLE}") from error
    if not specs:
        raise WorkloadError(f"{path} is empty; a line is one request, e.g. {_EXAMPLE}")
    return sorted(specs, key=lambda spec: spec.at)


_EXAMPLE = '{"at": 0.5, "kind": "image", "text_tokens": 20, "output_tokens": 8, "images": [[448, 448]]}'


def _draw(kind: Kind, at: float, random: np.random.Generator) -> RequestSpec:
    images = int(random.integers(kind.images[0], kind.images[1] + 1))
    size = kind.sizes[int(random.integers(len(kind.sizes)))] if kind.sizes else (0, 0)
    return RequestSpec(
        at=at,
        kind=kind.name,
        text_tokens=_log_uniform(kind.text_tokens, random),
        output_tokens=_log_uniform(kind.output_tokens, random),
        images=(size,) * images,
    )


def _log_uniform(bounds: tuple[int, int], random: np.random.Generator) -> int:
    low, high = bounds
    return min(high, int(low * ((high + 1) / low) ** random.random()))
