"""Requests of a workload as the core takes them, with dummy contents."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from epd_scheduler.protocol import Sampling
from epd_scheduler.request import Item, Request
from epd_scheduler.simulation.images import Vision
from epd_scheduler.workload import RequestSpec

_SAMPLING = Sampling()  # no stop tokens: the output has its full length


def make_request(seq: int, spec: RequestSpec, vision: Vision) -> Request:
    """Images first, then the text, as in a chat template. No two images are the same."""
    items, start = [], 0
    for index, (width, height) in enumerate(spec.images):
        item = Item(key=f"{seq}/{index}", media=0, start=start, units=vision.units(width, height))
        items.append(item)
        start += item.rows
    tokens, positions = _dummies(start + spec.text_tokens)
    return Request(seq, tokens, positions, 0, tuple(items), _SAMPLING, spec.output_tokens, spec.at)


@lru_cache(maxsize=4096)
def _dummies(length: int) -> tuple[tuple[int, ...], npt.NDArray[np.int32]]:
    """Tokens and positions `[1, length]` of a prompt; shared, for nothing reads what they are."""
    return (0,) * length, np.zeros((1, length), np.int32)
