"""Measured beside simulated: what is compared, as data and as a table."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from epd_client import bench
from epd_client.profiling import Samples
from epd_scheduler.metrics_summary import Summary
from epd_scheduler.profile import EncodeCost, ForwardCost, Profile
from epd_scheduler.simulation.devices import Timing

from benchmarks.papers.common import table

HEAD = ("scenario", "sent/s", "TTFT mean (s)", "simulated", "error", "P90 (s)", "simulated", "error")
HEAD += ("tokens/s", "simulated", "error", "send lag (ms)", "encoder", "language", "error at this speed: mean", "P90")
DRAWS = 5  # simulations with spread, of which the mean counts: a minute's load has few requests
_LATER_S = 1e-3  # a batch takes tokens of sequences that decoded well before and after it


class Setup(msgspec.Struct, frozen=True):
    """What was measured of a topology while it was idle otherwise."""

    samples: tuple[Samples, ...]  # one for each time that the probes ran
    intake_s: float  # as in Timing, whose infinite bandwidth JSON has no word for
    exchange_s: float
    response_s: float

    @property
    def timing(self) -> Timing:
        return Timing(intake_s=self.intake_s, exchange_s=self.exchange_s, response_s=self.response_s)


class Measured(msgspec.Struct, frozen=True):
    """Everything that the simulator needs to be compared again."""

    host: str
    setups: dict[str, Setup]  # by topology
    runs: dict[str, bench.Run]  # by scenario


class Numbers(msgspec.Struct, frozen=True):
    """What is compared of a run."""

    mean: float  # TTFT, seconds
    p90: float
    tokens_s: float  # output tokens a second

    @classmethod
    def of(cls, summary: Summary) -> Numbers:
        ttft = summary.overall.ttft_s
        assert ttft is not None
        return cls(ttft.mean, ttft.p90, summary.output_tokens_s)

    @classmethod
    def mean_of(cls, summaries: Sequence[Summary]) -> Numbers:
        columns = zip(*(msgspec.structs.astuple(cls.of(each)) for each in summaries), strict=True)
        return cls(*map(statistics.fmean, columns))

    def error(self, measured: Numbers) -> Numbers:
        """Relative; positive: too high."""
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(measured)
        return Numbers(*(value / other - 1 for value, other in zip(mine, theirs, strict=True)))


class Speed(NamedTuple):
    """Of the plans of a run: the seconds that they took over those that the profile says."""

    factor: float = 1.0  # of the sums
    spread: float = 0.0  # standard deviation of the logarithm, plan by plan

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Speed:
        """From (measured, expected) seconds of each plan."""
        if not pairs:
            return cls()
        factor = sum(measured for measured, _ in pairs) / sum(expected for _, expected in pairs)
        return cls(factor, statistics.pstdev(math.log(measured / expected) for measured, expected in pairs))


class Simulate(Protocol):
    """Simulates a scenario; spreads and seed are those of `Timing`."""

    def __call__(
        self, profile: Profile, *, encode_spread: float = 0.0, forward_spread: float = 0.0, seed: int = 0
    ) -> Summary: ...


class Comparison(msgspec.Struct, frozen=True):
    """One scenario."""

    scenario: str
    rate: float  # requests a second that were sent
    send_lag_s: float  # P99
    measured: Numbers
    simulated: Numbers
    encoder: Speed
    language: Speed  # prompt chunks
    at_speed: Numbers  # simulated with costs that are so much higher or lower and spread so much


def compare(scenario: str, run: bench.Run, profile: Profile, simulate: Simulate) -> Comparison:
    """A scenario's measured run beside its simulation with a profile, and with one of the run's own speed."""
    encoder, language = encoder_speed(run, profile.encode), language_speed(run, profile.forward)
    own = msgspec.structs.replace(
        profile, encode=_scaled(profile.encode, encoder.factor), forward=_scaled(profile.forward, language.factor)
    )
    return Comparison(
        scenario,
        run.rate,
        run.send_lag_s,
        Numbers.of(run.summary),
        Numbers.of(simulate(profile)),
        encoder,
        language,
        Numbers.mean_of(
            [
                simulate(own, encode_spread=encoder.spread, forward_spread=language.spread, seed=seed)
                for seed in range(DRAWS)
            ]
        ),
    )


def encoder_speed(run: bench.Run, cost: EncodeCost) -> Speed:
    """Of the encode plans of a run, against a cost model."""
    plans = defaultdict[tuple[str, float, float], list[int]](list)
    for line in run.timelines:
        for span in line.spans:
            if span.name == "encode":
                plans[span.instance, span.start, span.end].append(span.detail["rows"])
    return Speed.of([(end - start, cost.seconds(rows)) for (_, start, end), rows in plans.items()])


def language_speed(run: bench.Run, cost: ForwardCost) -> Speed:
    """The same of the batches with prompt chunks. Who decodes meanwhile on the same instance has a row in them."""
    plans = defaultdict[tuple[str, float, float], list[tuple[int, int]]](list)
    decodes = list[tuple[float, float, int]]()  # start, end, context
    for line in run.timelines:
        prompt = sum(span.detail["tokens"] for span in line.spans if span.name == "prefill")
        migrates = any(span.name == "migrate" for span in line.spans)
        for span in line.spans:
            if span.name == "prefill":
                plans[span.instance, span.start, span.end].append((span.detail["first"], span.detail["tokens"]))
            elif span.name == "decode" and not migrates:
                decodes.append((span.start + _LATER_S, span.end - _LATER_S, prompt))
    pairs = []
    for (_, start, end), rows in plans.items():
        rows += [(context, 1) for begin, stop, context in decodes if begin < start and end < stop]
        pairs.append((end - start, cost.seconds(rows)))
    return Speed.of(pairs)


def markdown(comparisons: Sequence[Comparison]) -> str:
    """The table of docs/results.md."""
    rows = []
    for each in comparisons:
        cells = [each.scenario, f"{each.rate:.2f}"]
        error, at_speed = each.simulated.error(each.measured), each.at_speed.error(each.measured)
        for name, digits in (("mean", 3), ("p90", 3), ("tokens_s", 1)):
            cells += [f"{getattr(numbers, name):.{digits}f}" for numbers in (each.measured, each.simulated)]
            cells.append(f"{getattr(error, name):+.1%}")
        speeds = [f"{speed.factor:.2f} ± {speed.spread:.0%}" for speed in (each.encoder, each.language)]
        cells += [f"{each.send_lag_s * 1e3:.1f}", *speeds]
        rows.append([*cells, f"{at_speed.mean:+.1%}", f"{at_speed.p90:+.1%}"])
    return table(HEAD, rows)


def save(measured: Measured, path: Path) -> None:
    """Write as JSON."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.encode(measured))


def load(path: Path) -> Measured:
    """Read what `save` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=Measured)


def _scaled(cost: EncodeCost | ForwardCost, factor: float) -> EncodeCost | ForwardCost:
    return type(cost)(*(factor * value for value in msgspec.structs.astuple(cost)))
