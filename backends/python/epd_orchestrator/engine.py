"""The orchestrator: threads around the core. Triton-free, so that tests drive it in-process."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from epd_scheduler.config import Config
from epd_scheduler.request import EndEvent, Event, RefusedError, TokenEvent

from epd_orchestrator.hub import Hub
from epd_orchestrator.intake import Intake, Query
from epd_orchestrator.metrics import Metrics, Value
from epd_orchestrator.runner import ExchangeFn, Runner
from epd_orchestrator.session import Client, Session, Update

logger = logging.getLogger(__name__)

_INTAKE_THREADS = 4
_POLL_S = 0.05  # between two looks at which clients have gone
_MOST_POLL_S = 1.0  # the same at most, however long a look took, e.g. because one client did not answer
_PUBLISH_S = 0.5  # between two pushes of metrics
_CLOSE_S = 30.0  # for open requests to end at shutdown
_JOIN_S = 5.0  # for a thread to return after that; one in a call that never returns does not

Publish = Callable[[list[Value]], None]


class Engine:
    """Accepts queries and answers each client with updates, the last of them exactly once.

    Threads: an intake pool; one runner a worker; a dispatcher that detokenises and calls clients, so that runners
    never wait for one; a monitor that looks for cancelled requests, stalled workers and metrics to publish.
    No thread calls `exchange` or `publish` while no request is open.
    """

    def __init__(
        self,
        config: Config,
        intake: Intake,
        exchange: ExchangeFn,
        workers: Sequence[str],
        publish: Publish | None = None,
    ) -> None:
        self._intake = intake
        self._hub = Hub(config, workers)
        self._metrics = Metrics(config)
        self._push = publish
        self._publishing = threading.Lock()
        self._published = 0.0
        self._seqs = itertools.count(1)
        self._pool = ThreadPoolExecutor(_INTAKE_THREADS, thread_name_prefix="intake")
        self._threads = [
            *(Runner(self._hub, link, exchange) for link in self._hub.links),
            threading.Thread(target=_persist, args=(self._dispatch,), name="dispatcher", daemon=True),
            threading.Thread(target=_persist, args=(self._monitor,), name="monitor", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, query: Query, client: Client) -> None:
        """Take a query in; everything that becomes of it, refusal included, is told to `client`."""
        session = Session(next(self._seqs), query, client, time.monotonic())
        if self._hub.open(session):
            self._pool.submit(self._admit, session)

    def close(self) -> None:
        """Cancel what is open, wait for its end, stop all threads."""
        for session in self._hub.shut():
            self._hub.cancel(session)
        if not self._hub.wait_idle(_CLOSE_S):
            logger.error("requests are still open %g s after they were cancelled", _CLOSE_S)
        self._pool.shutdown()
        self._hub.close()
        for thread in self._threads:
            thread.join(_JOIN_S)
            if thread.is_alive():
                logger.error("thread '%s' does not return", thread.name)

    def _admit(self, session: Session) -> None:
        try:
            if not session.cancelled:
                prepared = self._intake.prepare(session.query, session.seq, session.progress.arrival)
                session.begin(prepared, self._intake.checkpoint.tokenizer)
                self._hub.add(session, prepared.request, prepared.media)
                return
            self._hub.end(session.seq, "cancelled", "cancelled by the client")
        except RefusedError as error:
            self._hub.end(session.seq, error.reason, str(error))
        except Exception as error:
            logger.exception("request '%s': intake failed", session.query.id)
            message = f"intake failed ({type(error).__name__}: {error}); see the server's log"
            self._hub.end(session.seq, "internal", message)

    # Dispatcher

    def _dispatch(self) -> None:
        while (work := self._hub.next_work()) is not None:
            events, endings = work
            now = time.monotonic()
            for seq, tokens, end in _by_request(events):
                if (session := self._hub.session(seq)) is not None:
                    self._answer(session, tokens, end, now)
            if endings and self._hub.idle:  # the next response lets the model unload: no call may be under way then
                with self._publishing:
                    self._publish()
            for session, update in endings:
                session.finish(update)

    def _answer(self, session: Session, tokens: list[TokenEvent], end: EndEvent | None, now: float) -> None:
        try:
            if tokens:
                self._deliver(session, tokens, now)
            if end:
                self._conclude(session, end, now)
        except Exception as error:  # a defect, which must not cost other requests their events
            logger.exception("request '%s': its answer could not be passed on", session.query.id)
            message = f"the answer could not be passed on ({type(error).__name__}: {error}); see the server's log"
            if end:
                self._hub.finish(session, Update(session.progress, end=EndEvent(session.seq, "internal", message)))
            else:
                session.fault = ("internal", message)
                self._hub.cancel(session)

    def _deliver(self, session: Session, tokens: list[TokenEvent], now: float) -> None:
        progress = session.progress
        if progress.last_token is None:
            self._metrics.first_token(now - progress.arrival)
        else:
            self._metrics.next_tokens(now - progress.last_token, len(tokens))
        over = session.stopped or session.fault
        session.push(tokens, now)
        if over:
            return
        if session.fault:
            self._hub.cancel(session)  # the session knows the reason to give
        elif session.stopped:
            self._hub.stop(session.seq)

    def _conclude(self, session: Session, end: EndEvent, now: float) -> None:
        update = session.last_update(end)
        assert update.end is not None
        self._metrics.ended(update.end.reason, now - session.progress.arrival)
        self._hub.finish(session, update)

    # Monitor

    def _monitor(self) -> None:
        while (sessions := self._hub.open_sessions()) is not None:
            begin = time.monotonic()
            for session in sessions:
                if not session.cancelled and session.poll():
                    self._hub.cancel(session)
            polling = time.monotonic() - begin
            self._hub.check_progress()
            with self._publishing:
                if time.monotonic() - self._published > _PUBLISH_S and not self._hub.idle:
                    self._publish()
            # To ask a thousand clients takes 20 ms: a tenth of the time.
            time.sleep(min(max(_POLL_S, 9 * polling), _MOST_POLL_S))

    def _publish(self) -> None:
        self._published = time.monotonic()
        if self._push is None:
            return
        try:
            stats = self._hub.stats()
            self._push(self._metrics.changes(stats, time.monotonic()))
        except Exception:
            logger.exception("metrics could not be published")


def _persist(body: Callable[[], None]) -> None:
    """Run a thread's `body` again if it fails: a defect, but without the thread no request would end."""
    while True:
        try:
            return body()
        except Exception:
            logger.exception("thread '%s' failed and goes on", threading.current_thread().name)
            time.sleep(_MOST_POLL_S)


def _by_request(events: list[Event]) -> list[tuple[int, list[TokenEvent], EndEvent | None]]:
    """Group events by request, each request's in order, so that a batch of tokens is one response."""
    tokens: dict[int, list[TokenEvent]] = {}
    ends: dict[int, EndEvent] = {}
    for event in events:
        own = tokens.setdefault(event.seq, [])
        if isinstance(event, TokenEvent):
            own.append(event)
        else:
            ends[event.seq] = event
    return [(seq, own, ends.get(seq)) for seq, own in tokens.items()]
