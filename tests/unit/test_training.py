"""Classes follow the impact of a request, not its modality."""

import math

import msgspec
import pytest
from epd_scheduler.config import Config, RPSConfig, SchedulerConfig
from epd_scheduler.core import Core
from epd_scheduler.impact import Impact, ImpactEstimator
from epd_scheduler.profile import Centre, EncodeCost, ForwardCost, Profile, ProfileError
from epd_scheduler.rps import delays
from epd_scheduler.training import train

from tests.simulated import make_request

# One millisecond an embedding row, 0.1 ms a prompt token: an image of 256 rows is far from a line of text.
PROFILE = Profile(
    model="example",
    device="example",
    encode=EncodeCost(per_row=1e-3),
    forward=ForwardCost(overhead=1e-3, per_token=1e-4),
    kv_bytes_token=1000,
    embedding_bytes_row=1000,
)
ESTIMATOR = ImpactEstimator(PROFILE, SchedulerConfig(encode_tokens=256, token_budget=512))

TEXTS = [ESTIMATOR.estimate(tokens, 32, ()) for tokens in (20, 40, 60, 80)]
IMAGES = [ESTIMATOR.estimate(rows + 20, 32, (rows,)) for rows in (200, 256, 300)]
VIDEOS = [ESTIMATOR.estimate(256 * frames + 20, 32, (256,) * frames) for frames in (16, 24, 32)]


def nearest(centres: tuple[Centre, ...], impact: Impact) -> str:
    x, y = math.log10(impact.prefill_s), math.log10(impact.kv_bytes)
    return min(centres, key=lambda c: math.hypot(c.log_prefill - x, c.log_kv - y)).name


def test_three_points_are_their_own_centres() -> None:
    centres = train([Impact(10.0, 1e6), Impact(0.01, 1e3), Impact(1.0, 1e5)])
    assert [centre.name for centre in centres] == ["sand", "pebble", "rock"]
    assert [(c.log_prefill, c.log_kv) for c in centres] == [
        pytest.approx((-2, 3)),
        pytest.approx((0, 5)),
        pytest.approx((1, 6)),
    ]


def test_each_modality_of_an_ordinary_workload_is_a_class() -> None:
    centres = train(TEXTS + IMAGES + VIDEOS)
    assert [nearest(centres, impact) for impact in (*TEXTS, *IMAGES, *VIDEOS)] == (
        ["sand"] * 4 + ["pebble"] * 3 + ["rock"] * 3
    )


def test_a_long_text_is_a_pebble() -> None:
    centres = train(TEXTS + IMAGES + VIDEOS)
    assert nearest(centres, ESTIMATOR.estimate(1500, 32, ())) == "pebble"


def test_a_short_clip_is_a_pebble_and_a_thumbnail_is_sand() -> None:
    centres = train(TEXTS + IMAGES + VIDEOS)
    assert nearest(centres, ESTIMATOR.estimate(148, 32, (64, 64))) == "pebble"
    assert nearest(centres, ESTIMATOR.estimate(24, 32, (4,))) == "sand"


def test_a_sample_without_variety_is_refused() -> None:
    with pytest.raises(ProfileError, match="fewer than three different requests"):
        train([Impact(1.0, 1.0)] * 10 + [Impact(2.0, 1.0)])


def test_delays_of_rps_are_20_times_what_the_typical_request_takes_alone() -> None:
    """0.1 s and 3.2 s alone."""
    centres = (Centre("sand", -2.0, 3.0), Centre("pebble", -1.0, 5.0), Centre("rock", 0.5, 6.0))
    profile = msgspec.structs.replace(PROFILE, centres=centres)
    assert delays(RPSConfig(), profile) == pytest.approx({"sand": 0.0, "pebble": 2.0, "rock": 63.2456})
    assert delays(RPSConfig(rock_delay=7.0), profile) == pytest.approx({"sand": 0.0, "pebble": 2.0, "rock": 7.0})
    assert delays(RPSConfig(classifier="modality"), profile) == {"sand": 0.0, "pebble": 1.0, "rock": 10.0}
    assert delays(RPSConfig(), None) == {"sand": 0.0, "pebble": 1.0, "rock": 10.0}


def test_a_rock_has_its_place_by_the_derived_delay() -> None:
    centres = (Centre("sand", -2.0, 3.0), Centre("pebble", -1.0, 5.0), Centre("rock", 0.5, 6.0))
    core = Core(
        Config(scheduler=SchedulerConfig(order="rps")), ["all"], msgspec.structs.replace(PROFILE, centres=centres)
    )
    core.add(make_request(5, [(900, 900)], 32, [1]), 5.0)
    (rock,) = core.order.for_prefill()
    assert (rock.klass, rock.rank) == ("rock", (pytest.approx(68.2456), 5))
