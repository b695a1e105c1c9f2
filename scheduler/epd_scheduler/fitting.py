"""From measured plans to the cost models of a profile. Needs scikit-learn; the server never imports this.

Non-negative least squares on relative errors: a plan of a millisecond counts as much as one of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import LinearRegression

from epd_scheduler.profile import EncodeCost, ForwardCost, MigrateCost

Floats = npt.NDArray[np.float64]
Cost = TypeVar("Cost", EncodeCost, ForwardCost, MigrateCost)


@dataclass(frozen=True)
class EncodeSample:
    """An encode plan: the embedding rows of its units, and how long it ran."""

    rows: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class ForwardSample:
    """A batch plan: (tokens before it, its tokens) of each row, and how long it ran."""

    rows: tuple[tuple[int, int], ...]
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens of the forward."""
        return sum(count for _, count in self.rows)


@dataclass(frozen=True)
class MigrateSample:
    """A migrate plan: its KV blocks, and how long it ran."""

    blocks: int
    seconds: float


@dataclass(frozen=True)
class Fit(Generic[Cost]):
    """A fitted cost model beside what it was fitted to."""

    cost: Cost
    measured: Floats  # seconds [n]
    predicted: Floats  # seconds [n]

    @property
    def errors(self) -> Floats:
        """Relative errors `[n]`, at least zero."""
        errors: Floats = np.abs(self.predicted - self.measured) / self.measured
        return errors

    @property
    def mean_error(self) -> float:
        """Mean relative error."""
        return float(self.errors.mean())

    @property
    def p90_error(self) -> float:
        """The relative error that nine plans of ten stay below."""
        return float(np.percentile(self.errors, 90))


def fit_encode(samples: Sequence[EncodeSample]) -> Fit[EncodeCost]:
    """Fit an encode plan's cost. Raises ValueError if there are no samples."""
    features = [[1.0, len(s.rows), sum(s.rows), sum(r * r for r in s.rows)] for s in samples]
    cost = EncodeCost(*_non_negative(features, _seconds(samples)))
    return Fit(cost, _seconds(samples), np.array([cost.seconds(s.rows) for s in samples]))


def fit_migrate(samples: Sequence[MigrateSample]) -> Fit[MigrateCost]:
    """Fit a migrate plan's cost. Raises ValueError if there are no samples."""
    cost = MigrateCost(*_non_negative([[1.0, s.blocks] for s in samples], _seconds(samples)))
    return Fit(cost, _seconds(samples), np.array([cost.seconds(s.blocks) for s in samples]))


def fit_forward(samples: Sequence[ForwardSample]) -> Fit[ForwardCost]:
    """Fit a forward's cost. Raises ValueError if there are no samples.

    The model is linear once it is known which forwards are bound by memory, that is, run at the floor. Those are
    the small ones: every number of tokens is tried as the limit, and the best fit of the whole model is kept. Of
    fits that differ by less than 0.1 % (root mean square), it is the one with the lowest limit.
    """
    sizes = sorted({sample.tokens for sample in samples})
    fits = [_fit_forward(samples, limit) for limit in (0, *sizes[:-1])]
    return min(fits, key=lambda fit: round(float(np.square(fit.errors).mean()), 6))


def _fit_forward(samples: Sequence[ForwardSample], limit: int) -> Fit[ForwardCost]:
    """The fit in which forwards of up to `limit` tokens run at the floor."""
    features = []
    for sample in samples:
        pairs = sum(count * (start + (count + 1) / 2) for start, count in sample.rows if count > 1)
        context = sum(start + 1 for start, count in sample.rows if count == 1)
        bound = (1.0, 0.0, 0.0) if sample.tokens <= limit else (0.0, float(sample.tokens), pairs)
        features.append([1.0, *bound, len(sample.rows), context])
    cost = ForwardCost(*_non_negative(features, _seconds(samples)))
    return Fit(cost, _seconds(samples), np.array([cost.seconds(s.rows) for s in samples]))


def _seconds(samples: Sequence[EncodeSample] | Sequence[ForwardSample] | Sequence[MigrateSample]) -> Floats:
    return np.array([sample.seconds for sample in samples], np.float64)


def _non_negative(features: Sequence[Sequence[float]], seconds: Floats) -> list[float]:
    """Coefficients >= 0 with the least sum of squared relative errors."""
    if not len(seconds):
        raise ValueError("no samples to fit; measure some plans of this kind first")
    weighted = np.array(features, np.float64) / seconds[:, None]
    scale = weighted.max(axis=0)
    scale[scale == 0] = 1.0  # columns differ by many orders of magnitude, which the solver does not like
    model = LinearRegression(positive=True, fit_intercept=False).fit(weighted / scale, np.ones(len(seconds)))
    return [float(coefficient) for coefficient in model.coef_ / scale]
