"""What the orchestrator knows of one worker instance, and what to say to it next. Guarded by the hub's lock."""

from __future__ import annotations

import threading

import msgspec
from epd_backend import doorbell
from epd_scheduler.protocol import Exchange, Plan, WorkerInfo

# An exchange's wait for an outcome. Well below 1 s: after that long without an answer Triton looks whether the stub has
# shown itself healthy since, and on a busy host it takes a live one for dead.
WAIT_S = 0.4
HELLO_S = 1.0  # between attempts to reach a lost instance
HEARTBEAT_S = 0.5  # an instance without plans is asked who it is after that


class Parcel(msgspec.Struct, frozen=True):
    """A plan to submit and the media bytes that it needs, by handle."""

    plan: Plan
    media: dict[int, bytes]


class Call(msgspec.Struct, frozen=True):
    """One exchange to make."""

    exchange: Exchange
    media: bytes


class Link:
    """One instance. `info` is None while it is not known to be alive and idle: until its hello, and after a loss."""

    def __init__(self, name: str, lock: threading.RLock) -> None:
        self.name = name
        self.wake = threading.Condition(lock)
        self.info: WorkerInfo | None = None
        self.outbox: list[Parcel] = []
        self.submitted: set[int] = set()  # plans without an outcome
        self.calling = False
        self.abandoned = False  # the call under way has been given up; nobody waits for it any more
        self.draining = False  # lost but alive: it still works off plans that nobody wants any more
        self.lost: dict[int, float] = {}  # processes that may still run plans, and when they were lost
        self.progress = 0.0  # when it last did what was expected of it
        self.replied = 0.0
        self.next_hello = 0.0

    def lose(self, now: float) -> None:
        """Forget what was under way."""
        if self.info:
            self.lost[self.info.pid] = now
        self.info = None
        self.outbox.clear()
        self.submitted.clear()
        self.next_hello = now + HELLO_S

    @property
    def silent(self) -> bool:
        """Processes that were lost get no more calls that could tell whether they are idle."""
        return self.abandoned or self.info is not None

    def put(self, parcel: Parcel, now: float) -> None:
        """A plan for the next exchange, and an end to the wait of the one under way."""
        if not self.busy:
            self.progress = now
        self.outbox.append(parcel)
        if self.calling and self.info:
            doorbell.ring(self.info.bell)
        self.wake.notify()

    @property
    def busy(self) -> bool:
        """Something is outstanding: a call, or a plan without outcome."""
        return bool(self.calling and not self.abandoned) or bool(self.outbox or self.submitted)

    def unanswered(self, now: float) -> bool:
        """A first answer is due any moment: whether the instance is there is not decided yet."""
        return (
            self.info is None and not self.draining and not self.abandoned and (self.calling or now >= self.next_hello)
        )

    def next_call(self, now: float, winding_down: bool) -> Call | None:
        """The next exchange, if one is due. `winding_down`: begin nothing that is not needed to get plans finished."""
        if self.info is None:
            due = now >= self.next_hello and not winding_down
            return self._begin(now, Exchange(hello=True, wait_s=WAIT_S)) if due else None
        if not self.submitted and now - self.replied >= HEARTBEAT_S and (self.outbox or not winding_down):
            # After a pause the instance may be another process, which does not hold what the core believes it does.
            return self._begin(now, Exchange(hello=True, wait_s=WAIT_S))
        if not self.submitted and not self.outbox:
            return None
        parcels, self.outbox = self.outbox, []
        self.submitted.update(parcel.plan.id for parcel in parcels)
        media, where = _join(parcels)
        plans = tuple(parcel.plan for parcel in parcels)
        return self._begin(now, Exchange(plans, where, WAIT_S, pid=self.info.pid), media)

    def pause(self, now: float) -> float:
        """How long to sleep until `next_call` may have something, seconds."""
        due = self.next_hello if self.info is None else self.replied + HEARTBEAT_S
        return max(0.01, due - now)

    def _begin(self, now: float, exchange: Exchange, media: bytes = b"") -> Call:
        self.calling = True
        if exchange.hello:
            self.progress = now
        return Call(exchange, media)


def _join(parcels: list[Parcel]) -> tuple[bytes, dict[int, tuple[int, int]]]:
    media = {handle: data for parcel in parcels for handle, data in parcel.media.items()}
    where, at = {}, 0
    for handle, data in media.items():
        where[handle] = (at, len(data))
        at += len(data)
    return b"".join(media.values()), where
