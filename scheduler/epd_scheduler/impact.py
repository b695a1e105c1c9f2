"""What a request will cost, estimated from its metadata alone (RPS-Serve's impact estimator)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from epd_scheduler.config import SchedulerConfig
from epd_scheduler.profile import Profile
from epd_scheduler.request import Request


class Impact(msgspec.Struct, frozen=True):
    """Time and memory of a request."""

    prefill_s: float  # from the first encoding to the first token
    kv_bytes: float  # prompt and output


class ImpactEstimator:
    """Time and memory of a request before any of it has run: alone, on an idle encoder and an idle prefill instance."""

    def __init__(self, profile: Profile, config: SchedulerConfig) -> None:
        self._profile = profile
        self._encode_tokens = config.encode_tokens
        self._token_budget = config.token_budget
        self._window = config.window(stages=1)
        self._overlap = config.overlap != "none"

    def estimate(self, prompt_tokens: int, max_tokens: int, unit_rows: Sequence[int], *, apart: bool = True) -> Impact:
        """Of a prompt that begins with its images, as chat templates make them: the embedding rows of each unit.

        `apart`: encoder and prefill instance have devices of their own, so that they can work at the same time.
        """
        starts = accumulate(unit_rows, initial=0)
        return self._impact(prompt_tokens, max_tokens, list(zip(starts, unit_rows, strict=False)), apart)

    def estimate_request(self, request: Request, *, apart: bool = True) -> Impact:
        """The same of a request as the core gets it, with its images where they are."""
        units = []
        for item in request.items:
            starts = accumulate(item.units, initial=item.start)
            units += list(zip(starts, item.units, strict=False))
        return self._impact(len(request.tokens), request.max_tokens, units, apart)

    def _impact(self, prompt: int, output: int, units: Sequence[tuple[int, int]], apart: bool) -> Impact:
        seconds = self._first_token(prompt, self._encodings(units), self._overlap and apart)
        return Impact(seconds, float((prompt + output) * self._profile.kv_bytes_token))

    def _encodings(self, units: Sequence[tuple[int, int]]) -> list[tuple[int, float]]:
        """(first token that waits for it, when it is done) of each batch of at least C tokens, one after the other."""
        encodings: list[tuple[int, float]] = []
        begin, gathered, now = 0, 0, 0.0  # first unit of the batch, its tokens, the end of the batch before
        for index, (_, rows) in enumerate(units, 1):
            gathered += rows
            if gathered >= self._encode_tokens or index == len(units):
                now += self._profile.encode.seconds(rows for _, rows in units[begin:index])
                encodings.append((units[begin][0], now))
                begin, gathered = index, 0
        return encodings

    def _first_token(self, prompt: int, encodings: list[tuple[int, float]], overlap: bool) -> float:
        """When the last chunk of at most B tokens is done.

        With overlap, a two-stage pipeline: a chunk has what is encoded when it is put together, which is when the
        window of plans in flight has room for it, or when there is something to put together.
        """
        now = encodings[-1][1] if encodings and not overlap else 0.0
        ends = deque([now] * self._window, maxlen=self._window)  # of the last chunks: room when the first is done
        waiting = deque(encodings)
        done = 0
        while done < prompt:
            while waiting and waiting[0][1] <= now:
                waiting.popleft()
            ready = waiting[0][0] if waiting else prompt
            if ready == done:
                now = waiting[0][1]
                continue
            count = min(self._token_budget, ready - done)
            ends.append(max(now, ends[-1]) + self._profile.forward.seconds([(done, count)]))
            done += count
            now = max(now, ends[0])
        return ends[-1]
