"""What enters the core, a Request, and what leaves it, events. Plain data."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from epd_scheduler.protocol import Sample, Sampling

Class = Literal["sand", "pebble", "rock"]
CLASSES: tuple[Class, ...] = ("sand", "pebble", "rock")


class Item(msgspec.Struct, frozen=True):
    """One multimodal item: prompt tokens `start ..< start + sum(units)` take its embedding rows, in order."""

    key: str  # content address: equal keys have equal embeddings
    media: int  # handle of the encoded bytes, which the orchestrator holds until the request ends
    start: int  # index in the prompt of the item's first placeholder token
    units: tuple[int, ...]  # embedding rows of each encoder unit, in prompt order

    @property
    def rows(self) -> int:
        """Embedding rows, and so placeholder tokens, of the item."""
        return sum(self.units)


class Request(msgspec.Struct, frozen=True):
    """A validated, tokenised request."""

    seq: int  # unique for the life of the core
    tokens: tuple[int, ...]  # the prompt; placeholders expanded to one token an embedding row
    positions: npt.NDArray[np.int32]  # int32 [d, len(tokens)], d = 3 (mRoPE) or 1
    position_delta: int  # a generated token at index i has position i + position_delta in all d components
    items: tuple[Item, ...]  # in prompt order, disjoint
    sampling: Sampling
    max_tokens: int  # >= 1
    arrival: float  # time.monotonic() seconds
    priority: int = 0  # the client's class: 1 sand, 2 pebble, 3 rock; 0: not stated
    slo: float | None = None  # the client's: seconds to the first token


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """One piece of a request's timeline: `name` ran from `start` to `end` (time.monotonic() seconds)."""

    name: str  # "queued", "encode", "prefill", "first token", "migrate", "decode"; "preempted", "lost", "failed"
    start: float
    end: float
    instance: str = ""
    detail: dict[str, int] = {}  # e.g. {"item": 0, "unit": 0, "rows": 64} or {"first": 0, "tokens": 256}


TokenEvent = Sample  # a generated token, in order, each exactly once; end-of-sequence tokens are not reported

EndReason = Literal["stop", "length", "cancelled", "invalid_argument", "unavailable", "internal"]


class EndEvent(msgspec.Struct, frozen=True):
    """A request's only end and last event. Reason "stop" and "length" are success, "cancelled" is by request."""

    seq: int
    reason: EndReason
    message: str = ""
    timeline: tuple[Span, ...] = ()
    klass: Class = "sand"


Event = TokenEvent | EndEvent


class RefusedError(Exception):
    """The core does not take the request: it can never be served, or not now."""

    def __init__(self, reason: Literal["invalid_argument", "unavailable"], message: str) -> None:
        super().__init__(message)
        self.reason = reason
