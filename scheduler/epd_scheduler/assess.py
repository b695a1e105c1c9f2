"""What the core knows of a request at its arrival: its class and its deadline."""

from __future__ import annotations

from epd_scheduler.classify import Classifier, ImpactClassifier, ModalityClassifier
from epd_scheduler.config import SchedulerConfig
from epd_scheduler.impact import ImpactEstimator
from epd_scheduler.profile import Profile, ProfileError
from epd_scheduler.request import CLASSES, Class, Request


class Assessor:
    """Classes and deadlines, by the client's word if the operator lets it count, else by estimate."""

    def __init__(self, config: SchedulerConfig, profile: Profile | None) -> None:
        """Raises ProfileError if order "rps" shall use the profile's classes and there are none."""
        self._config = config
        self._estimator = ImpactEstimator(profile, config) if profile else None
        self._classifier: Classifier = ModalityClassifier()
        if config.rps.classifier == "impact":
            if profile and (profile.centres or config.order == "rps"):
                self._classifier = ImpactClassifier(profile)
            elif config.order == "rps":
                raise ProfileError(
                    "order 'rps' needs 'scheduler.profile' (make one with `epd profile`), "
                    "or 'scheduler.rps.classifier: modality'"
                )

    def assess(self, request: Request, *, apart: bool) -> tuple[Class, float]:
        """Class and deadline (time.monotonic() seconds) of a request. `apart` as in `ImpactEstimator.estimate`."""
        stated = self._config.client_priority
        impact = self._estimator.estimate_request(request, apart=apart) if self._estimator else None
        klass = self._classifier.classify(request, impact)
        if stated and request.priority > 0:
            klass = CLASSES[min(request.priority, 3) - 1]
        slo = request.slo if stated else None
        if slo is None:
            slo = max(self._config.slo.floor, self._config.slo.scale * (impact.prefill_s if impact else 0.0))
        return klass, request.arrival + slo
