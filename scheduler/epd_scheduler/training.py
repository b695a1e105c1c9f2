"""Trains the classifier of a profile: three clusters of requests by impact (RPS-Serve). Needs scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sklearn.cluster import KMeans

from epd_scheduler.impact import Impact
from epd_scheduler.profile import Centre, ProfileError
from epd_scheduler.request import CLASSES


def train(impacts: Sequence[Impact]) -> tuple[Centre, ...]:
    """Centres of sand, pebbles and rocks, by k-means in the plane of log10(prefill seconds) and log10(KV bytes).

    The cluster of the least impact is sand. Raises ProfileError if the sample holds fewer than three kinds.
    """
    points = np.log10([[impact.prefill_s, impact.kv_bytes] for impact in impacts])
    if len(np.unique(points, axis=0)) < len(CLASSES):
        raise ProfileError("the workload sample has fewer than three different requests; use a more varied mix")
    means = KMeans(len(CLASSES), n_init=10, random_state=0).fit(points).cluster_centers_
    ordered = sorted(means.tolist(), key=sum)  # log(time) + log(memory): the product of both
    return tuple(Centre(name, x, y) for name, (x, y) in zip(CLASSES, ordered, strict=True))
