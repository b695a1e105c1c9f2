"""Latency metrics of finished requests, measured or simulated: plain results in, plain numbers out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np


class SLO(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Service level objective of a request: seconds to the first token, and seconds a later token on average."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf

    def scaled(self, factor: float) -> SLO:
        """A looser (> 1) or tighter (< 1) objective."""
        return SLO(self.ttft_s * factor, self.tpot_s * factor)


class RequestResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one request. Times are seconds on one clock.

    `arrival` is when the request was to be sent: had it been the moment of sending, a load generator that waits for
    a slow server would not see how slow it is (coordinated omission).
    """

    kind: str  # of the workload, e.g. "text"
    arrival: float
    first_token: float | None = None  # None: failed before
    end: float  # of the last token, or of the failure
    output_tokens: int = 0
    klass: str = ""  # the server's: "sand", "pebble", "rock"; "" if unknown
    preemptions: int = 0
    preempted_s: float = 0.0
    error: str = ""  # empty: success

    @property
    def ok(self) -> bool:
        """The request was answered completely."""
        return not self.error and self.first_token is not None

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token; infinite without one."""
        return math.inf if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot_s(self) -> float:
        """Mean seconds from a token to the next; zero for a single token."""
        if self.first_token is None or self.output_tokens < 2:
            return 0.0
        return (self.end - self.first_token) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """Seconds to the end."""
        return self.end - self.arrival

    def lateness(self, slo: SLO) -> float:
        """Seconds by which the request misses its SLO: the first token's or, if larger, that of all later ones.

        Zero if it is met, infinite if the request failed.
        """
        if not self.ok:
            return math.inf
        decode = (self.tpot_s - slo.tpot_s) * max(self.output_tokens - 1, 0) if self.output_tokens > 1 else 0.0
        return max(0.0, self.ttft_s - slo.ttft_s, decode)


class Distribution(msgspec.Struct, frozen=True):
    """Mean and percentiles, linearly interpolated."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """None if there are no values."""
        array = np.fromiter(values, np.float64)
        return cls(float(array.mean()), *np.percentile(array, (50, 90, 99)).tolist()) if array.size else None


class Group(msgspec.Struct, frozen=True):
    """Metrics of a group of requests. Distributions are of the successful ones, in seconds."""

    requests: int
    failed: int
    ttft_s: Distribution | None
    tpot_s: Distribution | None  # of requests with two tokens or more
    e2e_s: Distribution | None
    normalised_s: Distribution | None  # end-to-end seconds an output token
    attainment: float  # share that met the SLO; a failed request did not
    severity_s: float  # mean seconds by which the answered requests that missed the SLO did so
    preemptions: int
    preempted_s: float  # in total


class Summary(msgspec.Struct, frozen=True):
    """Metrics of a run."""

    duration_s: float  # from the first arrival to the last end
    requests_s: float  # answered requests a second
    output_tokens_s: float
    overall: Group
    kinds: dict[str, Group]
    classes: dict[str, Group]  # empty if the server does not classify


def summarise(results: Sequence[RequestResult], slos: Mapping[str, SLO]) -> Summary:
    """All metrics of a run; `slos` are by kind, kinds without one always meet it. Raises ValueError without results."""
    if not results:
        raise ValueError("no results to summarise")
    duration = max(max(r.end for r in results) - min(r.arrival for r in results), 1e-9)
    answered = [result for result in results if result.ok]
    kinds = dict.fromkeys(result.kind for result in results)
    classes = dict.fromkeys(result.klass for result in results if result.klass)
    return Summary(
        duration_s=duration,
        requests_s=len(answered) / duration,
        output_tokens_s=sum(result.output_tokens for result in answered) / duration,
        overall=_group(results, slos),
        kinds={kind: _group([r for r in results if r.kind == kind], slos) for kind in kinds},
        classes={klass: _group([r for r in results if r.klass == klass], slos) for klass in classes},
    )


def attainment(results: Sequence[RequestResult], slos: Mapping[str, SLO]) -> float:
    """Share of the requests that met their SLO."""
    return sum(result.lateness(slos.get(result.kind, SLO())) == 0 for result in results) / len(results)


def goodput(
    measure: Callable[[float], float],
    *,
    start: float,
    target: float = 0.9,
    precision: float = 0.05,
    doublings: int = 10,
) -> float:
    """The highest rate at which `measure(rate)`, the SLO attainment, is at least `target`; found by bisection.

    From `start` the rate is doubled (or halved) until the attainment crosses `target`, at most `doublings` times,
    then bisected until the bracket is within `precision` of its upper end. Returns the highest rate that has met the
    target, 0.0 if none has.
    """
    met, missed, rate = 0.0, math.inf, start
    for _ in range(doublings):
        if measure(rate) >= target:
            met, rate = rate, rate * 2
        else:
            missed, rate = rate, rate / 2
        if met and missed < math.inf:
            break
    while met and missed < math.inf and missed - met > precision * missed:
        rate = (met + missed) / 2
        if measure(rate) >= target:
            met = rate
        else:
            missed = rate
    return met


def _group(results: Sequence[RequestResult], slos: Mapping[str, SLO]) -> Group:
    answered = [result for result in results if result.ok]
    late = [lateness for r in answered if (lateness := r.lateness(slos.get(r.kind, SLO()))) > 0]
    return Group(
        requests=len(results),
        failed=len(results) - len(answered),
        ttft_s=Distribution.of(r.ttft_s for r in answered),
        tpot_s=Distribution.of(r.tpot_s for r in answered if r.output_tokens > 1),
        e2e_s=Distribution.of(r.e2e_s for r in answered),
        normalised_s=Distribution.of(r.e2e_s / r.output_tokens for r in answered if r.output_tokens),
        attainment=attainment(results, slos),
        severity_s=sum(late) / len(late) if late else 0.0,
        preemptions=sum(r.preemptions for r in results),
        preempted_s=sum(r.preempted_s for r in results),
    )
