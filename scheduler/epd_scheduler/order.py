"""Order policies: who is served first, who may take memory from whom."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter
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
        """Queued sequences with a token that has its embedding and is not scheduled, first to serve first.

        A snapshot: the queue may change while the iterator is in use, and who wakes meanwhile waits for the next one.
        """

    def for_encoding(self) -> Iterator[Sequence]:
        """The same for encoder work: sequences that need some."""

    def served(self, sequence: Sequence, tokens: int) -> None:
        """So many of the sequence's prompt tokens were put in a batch."""

    def update(self, sequence: Sequence) -> None:
        """Tokens of a sequence that stays queued were scheduled, or its embeddings planned, landed or lost."""

    def protects(self, klass: Class) -> bool:
        """True for a class that starts with all its memory, by preempting those that it outranks, and then keeps it."""

    def __len__(self) -> int:
        """Queued sequences."""


class SortedQueue:
    """Sequences sorted by a key that is unique and does not change while they are queued.

    Those for which nothing can be done now sleep: the queue keeps their place, but is not slowed down by them.
    """

    def __init__(self, key: Callable[[Sequence], Rank]) -> None:
        self._key = key
        self._awake: list[Sequence] = []
        self._asleep: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Insert in order, awake."""
        insort(self._awake, sequence, key=self._key)

    def remove(self, sequence: Sequence) -> None:
        """Take out; ValueError if it is not there."""
        if not (self._take(self._awake, sequence) or self._take(self._asleep, sequence)):
            raise ValueError(f"sequence {sequence.seq} is not queued")

    def set_awake(self, sequence: Sequence, awake: bool) -> None:
        """Let a sequence wake or sleep. Nothing happens if it does so already, or is not queued."""
        old, new = (self._asleep, self._awake) if awake else (self._awake, self._asleep)
        if self._take(old, sequence):
            insort(new, sequence, key=self._key)

    @property
    def first(self) -> Sequence:
        """The first, awake or not; ValueError if there is none."""
        return min((part[0] for part in (self._awake, self._asleep) if part), key=self._key)

    def _take(self, part: list[Sequence], sequence: Sequence) -> bool:
        index = bisect_left(part, self._key(sequence), key=self._key)
        if index == len(part) or part[index] is not sequence:
            return False
        del part[index]
        return True

    def __iter__(self) -> Iterator[Sequence]:
        """A snapshot of those that are awake, in order."""
        return iter(tuple(self._awake))

    def __len__(self) -> int:
        """Number of sequences, awake or not."""
        return len(self._awake) + len(self._asleep)


class Ranked:
    """One queue by rank; a policy adds the rank."""

    def __init__(self) -> None:
        self._queue = SortedQueue(attrgetter("rank"))
        self._with_items = SortedQueue(attrgetter("rank"))

    def rank(self, sequence: Sequence) -> Rank:
        """The policy: first to serve first."""
        raise NotImplementedError

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; a preempted one takes its old place."""
        sequence.rank = self.rank(sequence)
        self._queue.add(sequence)
        if sequence.request.items:
            self._with_items.add(sequence)
            self.update(sequence)

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

    def update(self, sequence: Sequence) -> None:
        """It sleeps while it has no tokens to schedule, and no images to encode."""
        if sequence.request.items:
            self._queue.set_awake(sequence, sequence.schedulable)
            self._with_items.set_awake(sequence, sequence.tracker.needs_encoding())

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
