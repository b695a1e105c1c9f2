"""Order policies: which queued sequence is served first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

from epd_scheduler.sequence import Sequence


class Order(Protocol):
    """The queue of sequences that wait for encoding or prefill, and everybody's rank."""

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, new or preempted."""

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue; ValueError if it is not there."""

    def ordered(self, now: float) -> Iterator[Sequence]:
        """Queued sequences, first to serve first. A snapshot: the queue may change while the iterator is in use."""

    def rank(self, sequence: Sequence, now: float) -> tuple[float, ...]:
        """Total order of all sequences, queued or not; less is served first and may take memory from more."""

    def __len__(self) -> int:
        """Queued sequences."""


class FCFS:
    """First come, first served, by the number that intake gave."""

    def __init__(self) -> None:
        self._queue: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue in order of `seq`, so that a preempted sequence takes its old place."""
        insort(self._queue, sequence, key=_number)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue; ValueError if it is not there."""
        index = bisect_left(self._queue, sequence.seq, key=_number)
        if index == len(self._queue) or self._queue[index] is not sequence:
            raise ValueError(f"sequence {sequence.seq} is not queued")
        del self._queue[index]

    def ordered(self, now: float) -> Iterator[Sequence]:  # noqa: ARG002
        """Queued sequences, oldest first."""
        return iter(tuple(self._queue))

    def rank(self, sequence: Sequence, now: float) -> tuple[float, ...]:  # noqa: ARG002
        """The older one first."""
        return (sequence.seq,)

    def __len__(self) -> int:
        """Queued sequences."""
        return len(self._queue)


def _number(sequence: Sequence) -> int:
    return sequence.seq


def make_order(name: str) -> Order:
    """The policy of that name."""
    return {"fcfs": FCFS}[name]()
