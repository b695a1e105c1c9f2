"""Measures what plans cost on a running server: real requests, one probe after the other, read off their timelines.

The server should be idle otherwise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from epd_scheduler.config import Config
from epd_scheduler.fitting import EncodeSample, ForwardSample, MigrateSample
from epd_scheduler.workload import RequestSpec

from epd_client import load
from epd_client.errors import EpdError
from epd_client.load import Observation
from epd_client.payload import TextMaker

Work = TypeVar("Work", bound=Hashable)

Layout = Callable[[int, int], tuple[int, ...]]
"""(width, height) of an image -> embedding rows of its encoder units."""

Step = Callable[[str, int, int], None]
"""(what, done, total) of a progress bar, called before each probe."""

SIZES = ((56, 56), (112, 112), (224, 224), (336, 224), (448, 224), (336, 336), (448, 448), (640, 480), (896, 896))
SEVERAL = ((112, 112), (224, 224), (448, 448))  # sizes of which a probe sends several images, too
COUNTS = (2, 4, 8)
BATCHES = (1, 2, 4, 8, 16)  # sequences that decode together
CONTEXTS = (32, 512, 2048)  # tokens of each
STEPS = 24  # decode steps of a probe during which all its sequences decode
MOST_STEPS = 512
FILL = 0.8  # share of the KV pool that a probe may use
MARGIN = 64  # tokens of a prompt for its template and question


@dataclass
class Samples:
    """Plans that ran, and how long each took: the median of those that did the same work."""

    encode: list[EncodeSample] = field(default_factory=list)
    prefill: list[ForwardSample] = field(default_factory=list)
    decode: list[ForwardSample] = field(default_factory=list)
    migrate: list[MigrateSample] = field(default_factory=list)  # none if prefill and decode share a device

    def add(self, seen: Observation, block_size: int) -> None:
        """Take the plans of a request that ran alone from its timeline; spans of one plan have the same times."""
        assert seen.timeline is not None
        encodes: dict[tuple[float, float], list[int]] = {}
        for span in seen.timeline.spans:
            seconds = span.end - span.start
            if span.name == "encode":
                encodes.setdefault((span.start, span.end), []).append(span.detail["rows"])
            elif span.name == "prefill":
                self.prefill.append(ForwardSample(((span.detail["first"], span.detail["tokens"]),), seconds))
            elif span.name == "migrate":
                self.migrate.append(MigrateSample(-(-seen.input_tokens // block_size), seconds))
        self.encode += [EncodeSample(tuple(sorted(rows)), end - start) for (start, end), rows in encodes.items()]

    def medians(self) -> Samples:
        """One sample for equal work."""
        return Samples(
            [EncodeSample(rows, seconds) for rows, seconds in _medians((s.rows, s.seconds) for s in self.encode)],
            [ForwardSample(rows, seconds) for rows, seconds in _medians((s.rows, s.seconds) for s in self.prefill)],
            [ForwardSample(rows, seconds) for rows, seconds in _medians((s.rows, s.seconds) for s in self.decode)],
            [MigrateSample(count, seconds) for count, seconds in _medians((s.blocks, s.seconds) for s in self.migrate)],
        )


class Profiler:
    """Probes one server."""

    def __init__(self, url: str, config: Config, layout: Layout, text: TextMaker) -> None:
        """`config` is the server's."""
        self._url = url
        self._config = config
        self._layout = layout
        self._text = text
        self._kv_tokens = int(FILL * config.kv.blocks * config.kv.block_size)
        self._longest = min(config.limits.context - MARGIN, self._kv_tokens)
        self._seed = 0

    def encode_probes(self) -> list[RequestSpec]:
        """Images of several sizes, alone and several in a request."""
        rows_limit = min(
            self._longest - MARGIN, int(FILL * self._config.embedding.blocks) * self._config.embedding.block_size
        )
        groups = [(size, 1) for size in SIZES] + [(size, count) for size in SEVERAL for count in COUNTS]
        return [
            _spec(text_tokens=4, images=(size,) * count)
            for size, count in groups
            if count * sum(self._layout(*size)) <= rows_limit and count <= self._config.limits.images
        ]

    def prefill_probes(self) -> list[RequestSpec]:
        """Prompts that are short chunks, and prompts that end in a short chunk behind long ones."""
        budget = self._config.scheduler.token_budget
        even = {*(budget // part for part in (64, 16, 8, 4, 2, 1)), budget * 3 // 4} - {0}
        # These lengths fill the tiles of matrix kernels; those of requests do not, and cost more.
        tails = sorted({*even, *(tail * 5 // 4 + 1 for tail in even if 16 <= tail < budget)})
        deeper = [depth * budget + tail for depth in (1, 3, 7) for tail in (tails[0], tails[-1])]
        lengths = [*tails, *deeper]
        return [_spec(text_tokens=length) for length in lengths if length <= self._longest]

    def decode_probes(self) -> list[tuple[int, int]]:
        """(sequences, context) of decode batches."""
        return [
            (batch, context)
            for context in CONTEXTS
            for batch in BATCHES
            if batch <= self._config.scheduler.max_rows
            and context + STEPS <= self._longest
            and batch * (context + STEPS) <= self._kv_tokens
        ]

    def collect(self, repeats: int, step: Step) -> Samples:
        """Run all probes `repeats` times. Raises EpdError if a request fails."""
        alone, batches = self.encode_probes() + self.prefill_probes(), self.decode_probes()
        self.send([alone[0], alone[-1]])  # the first forwards of a process are slow
        samples = self._run_alone(alone * repeats, step)
        samples.decode = self._run_batches(batches * repeats, step)
        return samples.medians()

    def _run_alone(self, specs: Sequence[RequestSpec], step: Step) -> Samples:
        samples = Samples()
        for done, spec in enumerate(specs):
            what = f"{len(spec.images)} images" if spec.images else f"{spec.text_tokens} tokens"
            step(f"encode and prefill: {what}", done, len(specs))
            (seen,) = self.send([spec])
            samples.add(seen, self._config.kv.block_size)
        return samples

    def _run_batches(self, probes: Sequence[tuple[int, int]], step: Step) -> list[ForwardSample]:
        """Decode steps of each probe, the median of its repeats: their contexts differ by some tokens."""
        alone: dict[int, Observation] = {}  # by context
        samples: dict[tuple[int, int], list[ForwardSample]] = {}
        for done, (batch, context) in enumerate(probes):
            step(f"decode: {batch} behind {context} tokens", done, len(probes))
            steps = STEPS if batch == 1 else STEPS + _steps_until_all_decode(batch, alone[context])
            longest = min(self._longest, self._kv_tokens // batch)
            if steps > MOST_STEPS or context + steps > longest:
                continue
            seen = self.send([_spec(text_tokens=context, output_tokens=steps)] * batch)
            if batch == 1:
                alone[context] = seen[0]
            if sample := decode_sample(seen):
                samples.setdefault((batch, context), []).append(sample)
        return [sorted(each, key=lambda sample: sample.seconds)[len(each) // 2] for each in samples.values()]

    def send(self, specs: Sequence[RequestSpec]) -> list[Observation]:
        """Send requests with contents never sent before, and wait. Raises EpdError if one fails."""
        self._seed += 1
        seen = load.run(self._url, load.prepare(specs, self._text, seed=self._seed))
        for observation in seen:
            if observation.error or observation.timeline is None:
                raise EpdError(f"a probe failed: {observation.error or 'no timeline came back'}", "INTERNAL")
        return seen


def decode_sample(seen: Sequence[Observation]) -> ForwardSample | None:
    """Time of a step while all sequences decode, from the times between their tokens; None if that was too short."""
    begin, end = max(o.tokens[0] for o in seen), min(o.tokens[-1] for o in seen)
    rows, times = [], []
    for observation in seen:
        inside = [index for index, at in enumerate(observation.tokens) if begin <= at <= end]
        if len(inside) < STEPS // 4:
            return None
        first, last = inside[0], inside[-1]
        times.append((observation.tokens[last] - observation.tokens[first]) / (last - first))
        rows.append((observation.input_tokens + (first + last) // 2, 1))
    return ForwardSample(tuple(sorted(rows)), statistics.median(times))


def _steps_until_all_decode(batch: int, alone: Observation) -> int:
    """Decode steps of the first sequence until the last one's prompt is prefilled, with some reserve."""
    result = alone.result
    return int(1.5 * (batch - 1) * result.ttft_s / result.tpot_s)


def _spec(text_tokens: int, output_tokens: int = 2, images: tuple[tuple[int, int], ...] = ()) -> RequestSpec:
    return RequestSpec(at=0.0, kind="probe", text_tokens=text_tokens, output_tokens=output_tokens, images=images)


def _medians(samples: Iterable[tuple[Work, float]]) -> Iterator[tuple[Work, float]]:
    groups: dict[Work, list[float]] = {}
    for work, seconds in samples:
        groups.setdefault(work, []).append(seconds)
    for work, times in groups.items():
        yield work, statistics.median(times)
