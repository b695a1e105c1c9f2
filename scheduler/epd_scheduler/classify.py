"""Sand, pebbles and rocks: the class of an arriving request (RPS-Serve's request classifier)."""

from __future__ import annotations

import math
from typing import Protocol

from epd_scheduler.impact import Impact
from epd_scheduler.profile import Profile, ProfileError
from epd_scheduler.request import CLASSES, Class, Request

_LEAST = 1e-9  # seconds, bytes: a profile may say that something costs nothing


class Classifier(Protocol):
    """Gives every request a class, from its metadata alone."""

    def classify(self, request: Request, impact: Impact | None) -> Class:
        """The class of a request; `impact` is None where no profile says what it costs."""


class ImpactClassifier:
    """The nearest of the trained centres in the plane of log10(prefill seconds) and log10(KV bytes)."""

    def __init__(self, profile: Profile) -> None:
        """Raises ProfileError if the profile holds no centres."""
        if {centre.name for centre in profile.centres} != set(CLASSES):
            raise ProfileError("the profile has no classifier: train it with `epd profile`")
        self._centres = profile.centres

    def classify(self, request: Request, impact: Impact | None) -> Class:  # noqa: ARG002
        """The class whose centre is nearest."""
        assert impact is not None
        x, y = math.log10(max(impact.prefill_s, _LEAST)), math.log10(max(impact.kv_bytes, _LEAST))
        return min(self._centres, key=lambda c: math.hypot(c.log_prefill - x, c.log_kv - y)).name


class ModalityClassifier:
    """Text is sand, one image a pebble, more are rocks: the naive classifier, to compare with."""

    def classify(self, request: Request, impact: Impact | None) -> Class:  # noqa: ARG002
        """The class by the number of items alone."""
        return CLASSES[min(len(request.items), 2)]
