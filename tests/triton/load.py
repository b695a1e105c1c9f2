"""Questions with known answers, asked without pause by several clients at once."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from epd_client import demo
from epd_client.client import Client, EpdError

from models import digits

SCANS, LABELS = digits.heldout()
IMAGES = [digits.render(scan) for scan in SCANS[:6]]
READING = "581234"  # the labels of the first six

TEXT_ONLY: Mapping[str, Any] = {"text": demo.TEXT_ONLY, "sampling": {"max_tokens": 12, "min_tokens": 12}}
PAUSE_S = 0.05  # after an error


def reading(count: int) -> dict[str, Any]:
    """Arguments of `Client.ask` whose right answer is `READING[:count]`."""
    return {"text": digits.QUESTION, "images": IMAGES[:count], "sampling": {"max_tokens": 16}}


@dataclass(frozen=True)
class Result:
    """What came of one question. `answer` is None if it failed, and `error` says why."""

    images: int
    begin: float  # time.monotonic() seconds
    end: float
    answer: str | None
    error: EpdError | None = None

    @property
    def right(self) -> bool:
        """The answer is there and no token differs."""
        return self.answer == (READING[: self.images] if self.images else demo.TEXT_ONLY_ANSWER)


class Load:
    """`users` threads that ask one question after the other, text only or one to six images, until the block ends."""

    def __init__(self, url: str, users: int = 4, timeout_s: float = 60.0) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._results: list[Result] = []
        self._threads = [threading.Thread(target=self._ask, args=(seed,), daemon=True) for seed in range(users)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(self._timeout_s + 10)
            assert not thread.is_alive(), "a request hangs"

    @property
    def results(self) -> list[Result]:
        """All that has ended, in order of the ends."""
        with self._changed:
            return list(self._results)

    def wait_for(self, count: int, *, since: float = 0.0, images: bool | None = None, right: bool = True) -> None:
        """Wait until `count` requests that began after `since` have right answers (with `right=False`: have failed)."""

        def enough() -> bool:
            matching = (
                r
                for r in self._results
                if r.begin >= since and r.right == right and (images is None or bool(r.images) == images)
            )
            return len(list(itertools.islice(matching, count))) == count

        with self._changed:
            assert self._changed.wait_for(enough, 60), f"not {count} results in a minute, last: {self._results[-3:]}"

    def _ask(self, seed: int) -> None:
        choose = random.Random(seed)
        with Client(self._url, timeout_s=self._timeout_s) as client:
            while not self._stop.is_set():
                images = choose.choice([0, 0, 1, 2, 4, 6])
                begin, answer, error = time.monotonic(), None, None
                try:
                    answer = client.ask(**(reading(images) if images else TEXT_ONLY)).text
                except EpdError as failure:
                    error = failure
                with self._changed:
                    self._results.append(Result(images, begin, time.monotonic(), answer, error))
                    self._changed.notify_all()
                if error:
                    self._stop.wait(PAUSE_S)
