"""The least time to the first token that a request's own stage times allow.

The floor of a pipeline without any gap: encodings follow one another from the arrival on, and a prefill chunk begins as
soon as the chunk before it has ended and the embeddings that its tokens take have been encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epd_client.timeline import Span, Timeline

STAGES = ("encode", "prefill", "migrate")


@dataclass(frozen=True)
class Stages:
    """Where the time to the first token of one request went. Seconds."""

    encode: tuple[float, ...]  # of each encoder batch
    prefill: tuple[float, ...]  # of each chunk
    overlapped_floor: float
    serial_floor: float  # all encodings, then all chunks
    intake: float  # from the arrival to the start of the first stage
    gaps: float  # time in which no stage worked on it, intake included


def stages(timeline: Timeline, image_starts: Sequence[int]) -> Stages:
    """Take a request's timeline apart; `image_starts` is the first prompt token of each."""
    first_token = timeline.arrival + (timeline.ttft_s or 0.0)
    spans = [span for span in timeline.spans if span.name in STAGES and span.end <= first_token]
    encodes = _batches(spans)
    prefills = [span for span in spans if span.name == "prefill"]
    return Stages(
        encode=tuple(end - start for start, end, _ in encodes),
        prefill=tuple(span.end - span.start for span in prefills),
        overlapped_floor=_overlapped(encodes, prefills, image_starts),
        serial_floor=sum(end - start for start, end, _ in encodes) + sum(span.end - span.start for span in prefills),
        intake=min(span.start for span in spans) - timeline.arrival,
        gaps=first_token - timeline.arrival - _covered(spans),
    )


def _batches(spans: list[Span]) -> list[tuple[float, float, int]]:
    """(start, end, last image) of each encoder batch: the images of one batch have spans with the same times."""
    batches: dict[tuple[float, float], int] = {}
    for span in spans:
        if span.name == "encode":
            key = (span.start, span.end)
            batches[key] = max(batches.get(key, 0), span.detail["item"])
    return [(start, end, last) for (start, end), last in sorted(batches.items())]


def _overlapped(encodes: list[tuple[float, float, int]], prefills: list[Span], image_starts: Sequence[int]) -> float:
    ready, at = dict[int, float](), 0.0  # image -> when the pipeline has encoded it
    for start, end, last in encodes:
        at += end - start
        ready |= dict.fromkeys(range(len(ready), last + 1), at)
    at = 0.0
    for span in prefills:
        behind = span.detail["first"] + span.detail["tokens"]
        needed = [ready[image] for image, start in enumerate(image_starts) if start < behind]
        at = max([at, *needed]) + span.end - span.start
    return at


def _covered(spans: list[Span]) -> float:
    """Seconds in which at least one of the spans was under way."""
    covered, until = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start):
        covered += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return covered
