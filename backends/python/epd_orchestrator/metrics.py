"""Numbers of the server, as plain data: the Triton adapter maps them to metric families and pushes what changed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Literal, NamedTuple

from epd_scheduler.config import Config
from epd_scheduler.request import CLASSES
from epd_scheduler.stats import Stats

Kind = Literal["counter", "gauge", "histogram"]

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.2, 0.5, 1.0)
_MOST_GAPS = 32  # observations a push; each is a message to the server, and tokens are many


class Family(NamedTuple):
    """One metric."""

    name: str
    kind: Kind
    description: str
    buckets: tuple[float, ...] = ()  # histogram: upper bounds, seconds


class Value(NamedTuple):
    """A change to push: an increment of a counter, the value of a gauge, an observation of a histogram."""

    family: str
    labels: dict[str, str]
    value: float


FAMILIES = (
    Family("epd_requests_total", "counter", "Requests that have ended, by reason"),
    Family("epd_tokens_total", "counter", "Tokens computed, by stage; encode counts embedding rows"),
    Family("epd_batches_total", "counter", "Batches computed, by stage; forward is prefill and decode together"),
    Family("epd_preemptions_total", "counter", "Sequences that gave up their KV cache and are computed again"),
    Family("epd_migrations_total", "counter", "Hand-overs of a KV cache from prefill to decode"),
    Family("epd_requests_waiting", "gauge", "Requests that wait for encoding or prefill"),
    Family("epd_requests_running", "gauge", "Requests in hand-over or decode"),
    Family("epd_class_waiting", "gauge", "Requests that wait for encoding or prefill, by class"),
    Family("epd_class_oldest_seconds", "gauge", "Since the arrival of the oldest of those, by class; 0: there is none"),
    Family("epd_class_tokens_total", "counter", "Tokens prefilled, by class"),
    Family("epd_class_wait_seconds", "histogram", "From arrival to the first plan of a request, by class", _LATENCY),
    Family(
        "epd_emulated_instances", "gauge", "Worker instances that wait for a cost model's time instead of computing"
    ),
    Family("epd_kv_usage", "gauge", "Part of the KV blocks in use, 0 to 1"),
    Family("epd_embedding_usage", "gauge", "Part of the embedding blocks in use, 0 to 1"),
    Family("epd_batch_fill", "gauge", "Mean tokens of the latest batches over their limit, by stage"),
    Family("epd_time_to_first_token_seconds", "histogram", "From arrival to the first token", _LATENCY),
    Family("epd_inter_token_seconds", "histogram", "Between tokens of a request; evenly thinned under load", _GAP),
    Family("epd_request_seconds", "histogram", "From arrival to the end of a request", _LATENCY),
)


class Metrics:
    """Collects observations; `changes` empties them. Thread-safe."""

    def __init__(self, config: Config) -> None:
        self._lock = threading.Lock()
        self._limits = {"encode": config.scheduler.encode_tokens, "forward": config.scheduler.token_budget}
        self._first_tokens: list[float] = []
        self._gaps: list[float] = []
        self._durations: list[float] = []
        self._ends: dict[str, int] = {}
        self._pushed = Stats()

    def first_token(self, seconds: float) -> None:
        """A request's first token came `seconds` after its arrival."""
        with self._lock:
            self._first_tokens.append(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """`count` more tokens came within `seconds`."""
        with self._lock:
            self._gaps.extend([seconds / count] * count)

    def ended(self, reason: str, seconds: float) -> None:
        """A request ended `seconds` after its arrival."""
        with self._lock:
            self._durations.append(seconds)
            self._ends[reason] = self._ends.get(reason, 0) + 1

    def changes(self, stats: Stats, now: float) -> list[Value]:
        """What has changed since the last call. `now` is time.monotonic()."""
        with self._lock:
            old, self._pushed = self._pushed, stats
            return [*self._counters(old, stats), *self._gauges(old, stats, now), *self._observations(stats)]

    def _counters(self, old: Stats, new: Stats) -> Iterator[Value]:
        ends, self._ends = self._ends, {}
        for reason, count in ends.items():
            yield Value("epd_requests_total", {"reason": reason}, count)
        for family, labels, before, after in (
            ("epd_tokens_total", {"stage": "encode"}, old.encoded_tokens, new.encoded_tokens),
            ("epd_tokens_total", {"stage": "prefill"}, old.prefilled_tokens, new.prefilled_tokens),
            ("epd_tokens_total", {"stage": "decode"}, old.decoded_tokens, new.decoded_tokens),
            ("epd_batches_total", {"stage": "encode"}, old.encode_batches, new.encode_batches),
            ("epd_batches_total", {"stage": "forward"}, old.batches, new.batches),
            ("epd_migrations_total", {}, old.migrations, new.migrations),
        ):
            if after > before:  # a core that began again counts from 0
                yield Value(family, labels, after - before)
        for name in CLASSES:
            if (count := new.preemptions.get(name, 0) - old.preemptions.get(name, 0)) > 0:
                yield Value("epd_preemptions_total", {"class": name}, count)
            if (count := new.prefilled.get(name, 0) - old.prefilled.get(name, 0)) > 0:
                yield Value("epd_class_tokens_total", {"class": name}, count)

    def _gauges(self, old: Stats, new: Stats, now: float) -> Iterator[Value]:
        yield Value("epd_requests_waiting", {}, new.queued)
        yield Value("epd_requests_running", {}, new.running)
        for name in CLASSES:
            yield Value("epd_class_waiting", {"class": name}, new.waiting.get(name, 0))
            yield Value("epd_class_oldest_seconds", {"class": name}, now - new.oldest.get(name, now))
        yield Value("epd_emulated_instances", {}, new.emulated)
        yield Value("epd_kv_usage", {}, new.kv_blocks_used / max(1, new.kv_blocks))
        yield Value("epd_embedding_usage", {}, new.embedding_blocks_used / max(1, new.embedding_blocks))
        for stage, tokens, batches in (
            ("encode", new.encoded_tokens - old.encoded_tokens, new.encode_batches - old.encode_batches),
            ("forward", new.batch_tokens - old.batch_tokens, new.batches - old.batches),
        ):
            if batches > 0:
                yield Value("epd_batch_fill", {"stage": stage}, tokens / (batches * self._limits[stage]))

    def _observations(self, new: Stats) -> Iterator[Value]:
        gaps = self._gaps[:: -(-len(self._gaps) // _MOST_GAPS) or 1]
        for family, seconds in (
            ("epd_time_to_first_token_seconds", self._first_tokens),
            ("epd_inter_token_seconds", gaps),
            ("epd_request_seconds", self._durations),
        ):
            yield from (Value(family, {}, value) for value in seconds)
        yield from (Value("epd_class_wait_seconds", {"class": name}, seconds) for name, seconds in new.waits)
        self._first_tokens, self._gaps, self._durations = [], [], []
