"""RPS-Serve's queue manager and priority regulator: sand before pebbles before rocks, and nobody starves.

* Three FCFS queues. A sequence's rank is its arrival plus its class's delay: linear aging, for a pebble outranks all
  sand that came `pebble_delay` seconds after it, a rock all that came `rock_delay` after it.
* While a pebble or rock waits it is also due `share` of the prompt tokens served, aged or not.
* Sand is never preempted, and starts by preempting what it outranks.

The longest wait that follows is derived in docs/scheduling.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from epd_scheduler.config import RPSConfig
from epd_scheduler.order import SortedQueue
from epd_scheduler.profile import Profile
from epd_scheduler.request import CLASSES, Class
from epd_scheduler.sequence import Rank, Sequence

PATIENCE = 20  # a derived delay is so many times what a typical request of the class takes alone


def delays(config: RPSConfig, profile: Profile | None) -> dict[Class, float]:
    """Seconds that a class's rank adds to the arrival: as configured, or derived from the profile's classes.

    A typical request is the centre of its class. Classes by modality say nothing of time: 1 and 10 s.
    """
    derived: dict[Class, float] = {"pebble": 1.0, "rock": 10.0}
    if profile and config.classifier == "impact":
        derived.update({centre.name: PATIENCE * 10**centre.log_prefill for centre in profile.centres})
    configured: dict[Class, float | None] = {"sand": 0.0, "pebble": config.pebble_delay, "rock": config.rock_delay}
    return {name: derived[name] if delay is None else delay for name, delay in configured.items()}


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


def _deadline(sequence: Sequence) -> Rank:
    return (sequence.deadline, sequence.seq)


class RPS:
    """The order of RPS-Serve (section 4: queue manager, priority regulator)."""

    def __init__(self, config: RPSConfig, token_budget: int, profile: Profile | None = None) -> None:
        """`profile` gives the delays that the configuration does not state."""
        self._delay = delays(config, profile)
        self._share = config.share
        self._budget = token_budget
        self._all = SortedQueue(_rank)
        self._queues = {name: SortedQueue(_rank) for name in CLASSES}
        self._with_items = SortedQueue(_rank)
        self._by_deadline = {name: SortedQueue(_deadline) for name in CLASSES}
        self._due: dict[Class, float] = {"pebble": 0.0, "rock": 0.0}  # tokens that the share owes to a class

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; a preempted one takes its old place."""
        sequence.rank = (sequence.request.arrival + self._delay[sequence.klass], sequence.seq)
        for queue in self._queues_of(sequence):
            queue.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue; ValueError if it is not there."""
        for queue in self._queues_of(sequence):
            queue.remove(sequence)

    def for_prefill(self) -> Iterator[Sequence]:
        """By rank, but classes that are due a whole batch first."""
        due = [name for name, tokens in self._due.items() if tokens > self._budget - 1e-6]  # sums of floats
        for name in due:
            yield from self._queues[name]
        yield from (s for s in self._all if s.klass not in due) if due else self._all

    def for_encoding(self) -> Iterator[Sequence]:
        """The first in rank, so that it always gets its turn; then class by class, within one by deadline."""
        if not len(self._with_items):
            return
        first = self._with_items.first
        yield first
        heads = {name: queue.first.rank for name, queue in self._by_deadline.items() if len(queue)}
        for name in sorted(heads, key=lambda name: heads[name]):
            for sequence in self._by_deadline[name]:
                if sequence is not first:
                    yield sequence

    def served(self, sequence: Sequence, tokens: int) -> None:
        """Each waiting class is owed its share of all tokens, one batch at most; what it gets is off."""
        for name, due in self._due.items():
            own = tokens if sequence.klass == name else 0
            owed = due + self._share * tokens if len(self._queues[name]) else 0.0
            self._due[name] = min(max(owed - own, 0.0), self._budget)

    def protects(self, klass: Class) -> bool:
        """Sand is never preempted and does not wait for others' memory."""
        return klass == "sand"

    def _queues_of(self, sequence: Sequence) -> list[SortedQueue]:
        queues = [self._all, self._queues[sequence.klass]]
        if sequence.request.items:
            queues += [self._with_items, self._by_deadline[sequence.klass]]
        return queues

    def __len__(self) -> int:
        """Queued sequences."""
        return len(self._all)
