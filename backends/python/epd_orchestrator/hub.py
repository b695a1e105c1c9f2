"""The core, the open requests and the links to the instances, consistent under one lock.

The rule of the last response. Triton crashes if a model unloads while one of its threads makes BLS calls, and unloading
waits for open responses. So calls begin only while a request is open, and the last open request is finished only when
no call and no plan is outstanding.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
from epd_scheduler.config import Config
from epd_scheduler.core import Core
from epd_scheduler.profile import configured_profile
from epd_scheduler.protocol import EncodePlan, Reply
from epd_scheduler.request import EndEvent, EndReason, Event, RefusedError, Request
from epd_scheduler.stats import Stats

from epd_orchestrator import process
from epd_orchestrator.link import Call, Link, Parcel
from epd_orchestrator.session import Session, Update

logger = logging.getLogger(__name__)

_FIRST_ANSWER_S = 5.0  # a new request waits so long for instances that are being asked who they are
_STOPPING = "the server is stopping; send the request again later"
_SETTLE_S = 0.05  # after a defect of the core, between two looks whether all instances are idle or gone


class Hub:
    """All methods are thread-safe and return without blocking, but `next_call`, `next_work`, `add` and `wait_idle`."""

    def __init__(self, config: Config, workers: Sequence[str]) -> None:
        self._config = config
        self._lock = threading.RLock()
        self._profile = configured_profile(config.scheduler)
        self._core = Core(config, workers, self._profile)
        self._links = {name: Link(name, self._lock) for name in workers}
        self._sessions: dict[int, Session] = {}  # open requests
        self._admitted: set[int] = set()  # those whose end the core owes
        self._media: dict[int, bytes] = {}
        self._events: deque[Event] = deque()
        self._ending: deque[tuple[Session, Update]] = deque()  # answered, but for the last response
        self._work = threading.Condition(self._lock)  # for the dispatcher
        self._answered = threading.Condition(self._lock)  # an instance has said hello or failed to
        self._opened = threading.Condition(self._lock)  # sessions have come or gone
        self._begun = False  # a request has come
        self._former: set[int] = set()  # processes that may run plans of a core that failed or of a predecessor
        self._stopping = False  # calls end so as they do when the server stops
        self._closing = False
        self._closed = False

    # Requests

    def open(self, session: Session) -> bool:
        """Take in a request. False: it is refused, and its end is on the way."""
        with self._lock:
            if not self._begun:
                self._begin()
            self._sessions[session.seq] = session
            self._opened.notify_all()
            self._work.notify()
            for link in self._links.values():
                self._bury(link, unrest=link.silent)
                link.wake.notify()
            if self._closing:
                self.end(session.seq, "unavailable", _STOPPING)
            elif len(self._sessions) > (most := self._config.limits.requests):
                self.end(session.seq, "unavailable", f"{most} requests are open; retry, or raise 'limits.requests'")
            else:
                return True
            return False

    def _begin(self) -> None:
        """Workers may still run plans of an orchestrator that died, and write to blocks that this core believes free.

        So all older than this process count as lost with plans under way, and no instance joins until each is idle or
        gone.
        """
        self._begun = True
        now = time.monotonic()
        for name, pids in process.older(self._links).items():
            self._links[name].lost = dict.fromkeys(pids, now)
            self._former |= pids

    def add(self, session: Session, request: Request, media: dict[int, bytes]) -> None:
        """Hand a prepared request to the core. Raises RefusedError."""
        with self._lock:
            self._await_answers()
            if session.cancelled:
                self.end(session.seq, "cancelled", "cancelled by the client")
                return
            self._media.update(media)
            self._admitted.add(session.seq)
            try:
                with self._changing() as core:
                    core.add(request, time.monotonic())
            except RefusedError:
                self._admitted.discard(session.seq)
                raise

    def end(self, seq: int, reason: EndReason, message: str) -> None:
        """End a request that the core does not know."""
        with self._lock:
            self._put(EndEvent(seq, reason, message))
            self._work.notify()

    def cancel(self, session: Session) -> None:
        """End a request at the client's wish, wherever it is."""
        with self._lock:
            session.cancelled = True
            with self._changing() as core:
                core.cancel(session.seq, time.monotonic())

    def stop(self, seq: int) -> None:
        """End a request whose text matched a stop string."""
        with self._changing() as core:
            core.stop(seq, time.monotonic())

    def _await_answers(self) -> None:
        """Wait until it is decided which instances are there: after a loss one may have been reloaded meanwhile."""
        deadline = time.monotonic() + _FIRST_ANSWER_S
        while (now := time.monotonic()) < deadline and any(link.unanswered(now) for link in self._links.values()):
            self._answered.wait(deadline - now)

    # Dispatcher

    def next_work(self) -> tuple[list[Event], list[tuple[Session, Update]]] | None:
        """Wait for events to deliver and last responses that may go out now; None when closed."""
        with self._lock:
            while True:
                events = list(self._events)
                self._events.clear()
                endings = self._permitted()
                if events or endings:
                    return events, endings
                if self._closed:
                    return None
                self._work.wait()

    def session(self, seq: int) -> Session | None:
        """The open request `seq`, unless its end is under way."""
        with self._lock:
            return self._sessions.get(seq)

    def finish(self, session: Session, update: Update) -> None:
        """The answer is complete: `next_work` will return it as soon as its last response may go out."""
        with self._lock:
            for handle in session.media:
                self._media.pop(handle, None)
            self._ending.append((session, update))

    def _permitted(self) -> list[tuple[Session, Update]]:
        permitted = []
        while self._ending and (len(self._sessions) > 1 or not any(link.busy for link in self._links.values())):
            session, update = self._ending.popleft()
            del self._sessions[session.seq]
            permitted.append((session, update))
        if permitted:
            self._opened.notify_all()
        return permitted

    # Runners

    def next_call(self, link: Link) -> Call | None:
        """Wait for the next exchange to make with an instance; None when closed."""
        with self._lock:
            while not self._closed:
                now = time.monotonic()
                if not self._sessions:
                    link.wake.wait()
                elif call := link.next_call(now, winding_down=len(self._sessions) == len(self._ending)):
                    return call
                else:
                    link.wake.wait(link.pause(now))
            return None

    def take_reply(self, link: Link, call: Call, reply: Reply) -> None:
        """The answer to `call`."""
        with self._lock:
            now = link.replied = time.monotonic()
            link.calling = link.abandoned = False
            if link.info is None or (call.exchange.hello and reply.info != link.info):
                self._take_hello(link, call, reply, now)
            else:
                self._take_outcomes(link, reply, now)
            self._after_call()

    def take_failure(self, link: Link, message: str, *, stopping: bool = False) -> None:
        """The call failed: the instance is gone or not there yet, or the server is `stopping` and refuses all calls."""
        with self._lock:
            self._stopping = self._stopping or stopping
            link.calling = link.abandoned = link.draining = False
            self._lose(link, message)
            self._after_call()

    def check_progress(self) -> None:
        """Give up instances that make no progress; end those that, given up, do not even come to rest."""
        with self._lock:
            limit = self._config.limits.stall_seconds
            for link in self._links.values():
                self._bury(link, unrest=link.silent)
                if link.busy and time.monotonic() - link.progress > limit:
                    link.abandoned = link.calling
                    self._lose(link, f"no progress for {limit:g} s ('limits.stall_seconds')")
                    self._after_call()

    def _bury(self, link: Link, unrest: bool) -> None:
        """`unrest`: lost processes have just shown that they are not idle, or are not asked any more.

        Else one may have come to rest while nobody asked.
        """
        now = time.monotonic()
        for pid, since in list(link.lost.items()):
            if not process.runs(pid):
                self._reclaim(link, pid)
            elif unrest and now - since > self._config.limits.stall_seconds:
                link.lost[pid] = now
                logger.error("process %d of lost instance '%s' does not come to rest and is ended", pid, link.name)
                process.end(pid)

    def _reclaim(self, link: Link, pid: int) -> None:
        if link.lost.pop(pid, None) is not None:
            self._former.discard(pid)
            with self._changing() as core:
                core.reclaim(pid)

    def _after_call(self) -> None:
        self._answered.notify_all()
        self._work.notify()

    def _take_hello(self, link: Link, call: Call, reply: Reply, now: float) -> None:
        info = reply.info if call.exchange.hello else None
        # Plans from before its loss would write to blocks that have other owners by now.
        link.draining = reply.pending > 0
        if info is None or link.draining:
            self._lose(link, "it still works off plans that were given up")
            link.next_hello = now
        elif info.name != link.name:
            self._lose(link, f"it calls itself '{info.name}'; a worker's name must be that of its model")
        else:
            link.lose(now)  # as another process than before it has nothing under way
            if self._former:
                self._settle(link, info.pid)
                if any(self._former.intersection(other.lost) for other in self._links.values()):
                    link.next_hello = now + _SETTLE_S  # another one may still write to its arenas
                    return
            link.info, link.progress = info, now
            self._stopping = False
            with self._changing() as core:
                core.join(info, now)
                # Not before: of one that was replaced unnoticed the core has but now taken the plans for lost.
                self._settle(link, info.pid)
            logger.info("instance '%s' joined: %s on %s", link.name, ", ".join(info.roles), info.device)

    def _settle(self, link: Link, idle: int) -> None:
        """Process `idle` of an instance has nothing under way; others of its name get no calls any more."""
        self._reclaim(link, idle)
        self._bury(link, unrest=True)

    def _take_outcomes(self, link: Link, reply: Reply, now: float) -> None:
        outcomes = [outcome for outcome in reply.outcomes if outcome.plan in link.submitted]
        if outcomes:
            link.progress = now
            link.submitted.difference_update(outcome.plan for outcome in outcomes)
            with self._changing() as core:
                for outcome in outcomes:
                    core.complete(outcome, now)
        if reply.pending < len(link.submitted):
            # Without a call that failed: Triton puts a model that it loads anew in the old one's place.
            self._lose(link, "another process has taken its place and knows nothing of the plans under way")
            link.next_hello = now

    def _lose(self, link: Link, reason: str) -> None:
        if link.info is not None or not link.next_hello:  # once, not at every attempt to reach it again
            logger.warning("instance '%s' is not available: %s", link.name, reason)
        now = time.monotonic()
        link.lose(now)
        with self._changing() as core:
            core.lose(link.name, now)
        self._bury(link, unrest=True)

    # The core

    @contextmanager
    def _changing(self) -> Iterator[Core]:
        """The core under the lock. What follows from the change is planned and handed out at the end.

        RefusedError passes; any other exception is a defect of the core: its requests fail, and a new core begins.
        """
        with self._lock:
            try:
                yield self._core
                self._advance(time.monotonic())
            except RefusedError:
                raise
            except Exception as error:
                logger.exception("the scheduling core failed; its %d requests fail with it", len(self._admitted))
                self._begin_again(f"the scheduler failed ({type(error).__name__}: {error}); see the server's log")

    def _advance(self, now: float) -> None:
        for plan in self._core.step(now):
            media = {unit.media: self._media[unit.media] for unit in plan.units} if isinstance(plan, EncodePlan) else {}
            self._links[plan.instance].put(Parcel(plan, media), now)
        for event in self._core.drain():
            if isinstance(event, EndEvent):
                self._admitted.discard(event.seq)
            self._put(event)
        if self._events:
            self._work.notify()

    def _put(self, event: Event) -> None:
        """An event for the dispatcher."""
        if self._stopping and isinstance(event, EndEvent) and event.reason == "unavailable":
            # Not for want of an instance, as the core believes.
            event = msgspec.structs.replace(event, message=_STOPPING)
        self._events.append(event)

    def _begin_again(self, message: str) -> None:
        now = time.monotonic()
        self._core = Core(self._config, tuple(self._links), self._profile)
        for link in self._links.values():
            link.lose(now)
            link.next_hello = now
        self._former = {pid for link in self._links.values() for pid in link.lost}
        self._events.extend(EndEvent(seq, "internal", message) for seq in self._admitted)
        self._admitted.clear()
        self._work.notify()

    # The rest

    @property
    def links(self) -> list[Link]:
        """One a worker instance."""
        return list(self._links.values())

    def open_sessions(self) -> list[Session] | None:
        """Wait until a request is open; None when closed."""
        with self._lock:
            while not self._sessions and not self._closed:
                self._opened.wait()
            return None if self._closed else list(self._sessions.values())

    @property
    def idle(self) -> bool:
        """No request is open."""
        with self._lock:
            return not self._sessions

    def stats(self) -> Stats:
        """The core's numbers."""
        with self._lock:
            return self._core.stats()

    def shut(self) -> list[Session]:
        """Refuse all further requests; those that are open."""
        with self._lock:
            self._closing = True
            return list(self._sessions.values())

    def wait_idle(self, timeout: float) -> bool:
        """Wait until no request is open."""
        with self._lock:
            return self._opened.wait_for(lambda: not self._sessions, timeout)

    def close(self) -> None:
        """Let all threads return."""
        with self._lock:
            self._closed = True
            for condition in (self._work, self._opened, self._answered, *(link.wake for link in self._links.values())):
                condition.notify_all()
