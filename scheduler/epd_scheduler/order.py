"""Order policies: who is served first, who may take memory from whom."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Protocol

from epd_scheduler.request import Class
from epd_scheduler.sequence import Rank, Sequence


class Order(Protocol):
    """The queue of sequences that wait for encoding or prefill.

    `add` gives a sequence its rank, a total order that never changes, so that nobody is overtaken for ever: less is
    served first and may take memory from more.
    """

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, new or preempted."""

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue; ValueError if it is not there."""

    def for_prefill(self) -> Iterator[Sequence]:
        """Queued sequences, first to serve first. A snapshot: the queue may change while the iterator is in use."""

    def for_encoding(self) -> Iterator[Sequence]:
        """The same for encoder work, of sequences with items alone."""

    def served(self, sequence: Sequence, tokens: int) -> None:
        """So many of the sequence's prompt tokens were put in a batch."""

    def protects(self, klass: Class) -> bool:
        """True for a class that starts with all its memory, by preempting those that it outranks, and then keeps it."""

    def __len__(self) -> int:
        """Queued sequences."""


class SortedQueue:
    """Sequences sorted by a key that is unique and does not change while they are queued."""

    def __init__(self, key: Callable[[Sequence], Rank]) -> None:
        self._key = key
        self._items: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Insert in order."""
        insort(self._items, sequence, key=self._key)

    def remove(self, sequence: Sequence) -> None:
        """Take out; ValueError if it is not there."""
        index = bisect_left(self._items, self._key(sequence), key=self._key)
        if index == len(self._items) or self._items[index] is not sequence:
            raise ValueError(f"sequence {sequence.seq} is not queued")
        del self._items[index]

    @property
    def first(self) -> Sequence:
        """The first; IndexError if there is none."""
        return self._items[0]

    def __iter__(self) -> Iterator[Sequence]:
        """A snapshot, in order."""
        return iter(tuple(self._items))

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._items)


class Ranked:
    """One queue by rank; a policy adds the rank."""

    def __init__(self) -> None:
        self._queue = SortedQueue(lambda sequence: sequence.rank)
        self._with_items = SortedQueue(lambda sequence: sequence.rank)

    def rank(self, sequence: Sequence) -> Rank:
        """The policy: first to serve first."""
        raise NotImplementedError

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; a preempted one takes its old place."""
        sequence.rank = self.rank(sequence)
        self._queue.add(sequence)
        if sequence.request.items:
            self._with_items.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue; ValueError if it is not there."""
        self._queue.remove(sequence)
        if sequence.request.items:
            self._with_items.remove(sequence)

    def for_prefill(self) -> Iterator[Sequence]:
        """By rank."""
        return iter(self._queue)

    def for_encoding(self) -> Iterator[Sequence]:
        """By rank."""
        return iter(self._with_items)

    def served(self, sequence: Sequence, tokens: int) -> None:
        """Nothing to account for."""

    def protects(self, klass: Class) -> bool:  # noqa: ARG002
        """Nobody."""
        return False

    def __len__(self) -> int:
        """Queued sequences."""
        return len(self._queue)


class FCFS(Ranked):
    """First come, first served, by the number that intake gave."""

    def rank(self, sequence: Sequence) -> Rank:
        """The older one first."""
        return (sequence.seq,)


class EDF(Ranked):
    """Earliest deadline first."""

    def rank(self, sequence: Sequence) -> Rank:
        """The nearest deadline first, then the older one."""
        return (sequence.deadline, sequence.seq)
