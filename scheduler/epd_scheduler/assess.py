"""What the core knows of a request at its arrival: its class and its deadline."""

from __future__ import annotations

from epd_scheduler.classify import Classifier, ImpactClassifier, ModalityClassifier
from epd_scheduler.config import SchedulerConfig
from epd_scheduler.profile import ImpactEstimator, Profile, ProfileError
from epd_scheduler.request import CLASSES, Class, Request


class Assessor:
    """Classes and deadlines, by the client's word if the operator lets it count, else by estimate."""

    def __init__(self, config: SchedulerConfig, profile: Profile | None) -> None:
        """Raises ProfileError if order "rps" shall use the profile's classes and there are none."""
        self._config = config
        self._estimator = ImpactEstimator(profile, config.encode_tokens, config.token_budget) if profile else None
        self._classifier: Classifier = ModalityClassifier()
        if config.rps.classifier == "impact":
            if profile and self._estimator and (profile.centres or config.order == "rps"):
                self._classifier = ImpactClassifier(profile, self._estimator)
            elif config.order == "rps":
                raise ProfileError(
                    "order 'rps' needs 'scheduler.profile' (make one with `epd profile`), "
                    "or 'scheduler.rps.classifier: modality'"
                )

    def assess(self, request: Request) -> tuple[Class, float]:
        """Class and deadline (time.monotonic() seconds) of a request."""
        stated = self._config.client_priority
        klass = self._classifier.classify(request)
        if stated and request.priority > 0:
            klass = CLASSES[min(request.priority, 3) - 1]
        slo = request.slo if stated else None
        if slo is None:
            alone = self._estimator.estimate_request(request).prefill_s if self._estimator else 0.0
            slo = max(self._config.slo.floor, self._config.slo.scale * alone)
        return klass, request.arrival + slo
