"""What the simulator must know of a server beside the costs of plans: tokens around images, time around plans."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from epd_client.load import Observation
from epd_client.payload import noise_jpeg
from epd_orchestrator.checkpoint import Checkpoint
from epd_orchestrator.intake import Intake, Query
from epd_scheduler.config import LimitsConfig
from epd_scheduler.simulation.devices import Timing
from epd_scheduler.simulation.requests import Template


def template(model: Path) -> Template:
    """Tokens that a checkpoint's chat template puts around images."""
    intake = Intake(Checkpoint.load(model), LimitsConfig())
    text, images = " a b", tuple(noise_jpeg(56, 56, np.random.default_rng(seed)) for seed in range(2))
    alone = intake.prepare(Query(text=text), 0, 0.0).request
    request = intake.prepare(Query(text=text, images=images), 0, 0.0).request
    first, second = request.items
    between = second.start - first.start - first.rows
    return Template(first.start, between, len(request.tokens) - second.start - second.rows - len(alone.tokens))


def timing(seen: Sequence[Observation]) -> Timing:
    """Medians over requests that ran alone, of text or with one image, so that no stage waited for another.

    `exchange_s` is from the end of the last chunk to the core's having its token; the way from the core to the worker
    takes as long, and the rest of what is before the first stage is intake. What the client sees in addition to the
    server's own TTFT is half the way in, half the way out.
    """
    intake, exchange, way = list[float](), list[float](), list[float]()
    for each in seen:
        line = each.timeline
        assert line is not None
        assert line.ttft_s is not None
        first_token = line.arrival + line.ttft_s
        work = [span for span in line.spans if span.name in ("encode", "prefill") and span.end <= first_token]
        intake.append(min(span.start for span in work) - line.arrival)
        exchange.append(first_token - max(span.end for span in work))
        way.append(each.tokens[0] - each.sent - line.ttft_s)
    back, around = statistics.median(exchange), statistics.median(way) / 2
    return Timing(intake_s=statistics.median(intake) - back + around, exchange_s=back, response_s=around)
