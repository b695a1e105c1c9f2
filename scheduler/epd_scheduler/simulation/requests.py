"""Requests of a workload as the core takes them, with dummy contents."""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from epd_scheduler.protocol import Sampling
from epd_scheduler.request import Item, Request
from epd_scheduler.simulation.images import Vision
from epd_scheduler.workload import RequestSpec

_SAMPLING = Sampling()  # no stop tokens: the output has its full length


class Template(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens that a chat template puts around images and their text; text alone is sent as it is."""

    head: int = 0  # before the first image; they can be prefilled while it is encoded
    between: int = 0  # from an image to the next
    tail: int = 0  # all others, behind the last image


def make_request(seq: int, spec: RequestSpec, vision: Vision, template: Template, slo: float | None) -> Request:
    """Images first, then the text, as in a chat template. No two images are the same. `slo` is the client's."""
    items, length = list[Item](), 0
    for index, (width, height) in enumerate(spec.images):
        start = length + (template.between if items else template.head)
        items.append(Item(key=f"{seq}/{index}", media=0, start=start, units=vision.units(width, height)))
        length = start + items[-1].rows
    if items:
        length += template.tail
    tokens, positions = _dummies(length + spec.text_tokens)
    return Request(seq, tokens, positions, 0, tuple(items), _SAMPLING, spec.output_tokens, spec.at, slo=slo)


@lru_cache(maxsize=4096)
def _dummies(length: int) -> tuple[tuple[int, ...], npt.NDArray[np.int32]]:
    """Tokens and positions `[1, length]` of a prompt; shared, for nothing reads what they are."""
    return (0,) * length, np.zeros((1, length), np.int32)
