"""Known coefficients come back from noiseless samples, and noise shows in the error."""

import numpy as np
import pytest
from epd_scheduler.fitting import EncodeSample, ForwardSample, MigrateSample, fit_encode, fit_forward, fit_migrate
from epd_scheduler.profile import EncodeCost, ForwardCost, MigrateCost

ENCODE = EncodeCost(overhead=2e-3, per_unit=3e-4, per_row=5e-5, per_square=2e-8)
MIGRATE = MigrateCost(overhead=3e-4, per_block=4e-5)
PLANS = [(r,) * n for r in (4, 16, 64, 256, 1024) for n in (1, 2, 4)]
CHUNKS = [((start, n),) for start in (0, 512, 2048) for n in (2, 16, 64, 128, 256, 512)]
STEPS = [((context, 1),) * batch for context in (16, 256, 1024) for batch in (1, 2, 4, 8)]


def coefficients(cost) -> list[float]:
    return [getattr(cost, name) for name in cost.__struct_fields__]


def test_encode() -> None:
    fit = fit_encode([EncodeSample(rows, ENCODE.seconds(rows)) for rows in PLANS])
    assert coefficients(fit.cost) == pytest.approx(coefficients(ENCODE), rel=1e-6)
    assert fit.mean_error == pytest.approx(0, abs=1e-9)


def test_migrate() -> None:
    fit = fit_migrate([MigrateSample(n, MIGRATE.seconds(n)) for n in (1, 4, 16, 64)])
    assert coefficients(fit.cost) == pytest.approx(coefficients(MIGRATE), rel=1e-6)


@pytest.mark.parametrize("floor", [0.0, 5e-3])
def test_forward_with_and_without_a_floor(floor: float) -> None:
    """A floor of 5 ms is reached at 64 tokens of 80 microseconds each: smaller forwards are bound by memory."""
    truth = ForwardCost(1e-3, floor, per_token=8e-5, per_pair=2e-8, per_row=1e-4, per_context=3e-7)
    fit = fit_forward([ForwardSample(rows, truth.seconds(rows)) for rows in CHUNKS + STEPS])
    assert coefficients(fit.cost) == pytest.approx(coefficients(truth), rel=1e-4, abs=1e-12)
    assert fit.p90_error == pytest.approx(0, abs=1e-6)


def test_a_negative_trend_becomes_a_constant() -> None:
    """Costs never fall with the work, whatever noise says."""
    fit = fit_migrate([MigrateSample(1, 3e-3), MigrateSample(100, 2e-3)])
    assert fit.cost.per_block == 0
    assert 2e-3 < fit.cost.overhead < 3e-3


def test_errors_are_relative() -> None:
    random = np.random.default_rng(0)
    samples = [EncodeSample(rows, ENCODE.seconds(rows) * random.uniform(0.9, 1.1)) for rows in PLANS * 4]
    fit = fit_encode(samples)
    assert 0.03 < fit.mean_error < 0.07  # of uniform noise of 10 %: 5 %
    assert fit.p90_error < 0.12


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples to fit"):
        fit_encode([])
