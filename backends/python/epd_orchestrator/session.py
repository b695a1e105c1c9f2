"""One open client request: from its arrival to its last response."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

import msgspec
from epd_scheduler.request import EndEvent, EndReason, TokenEvent
from tokenizers import Tokenizer

from epd_orchestrator.detokenizer import TextStream
from epd_orchestrator.intake import Prepared, Query

logger = logging.getLogger(__name__)


class Progress(msgspec.Struct):
    """What is known of a request so far. Times are time.monotonic() seconds."""

    id: str
    priority: int
    arrival: float
    prompt: str = ""
    input_tokens: int = 0
    first_token: float | None = None
    last_token: float | None = None


class Update(msgspec.Struct, frozen=True):
    """A piece of the answer. `end` comes with the last one only."""

    progress: Progress
    text: str = ""
    tokens: tuple[TokenEvent, ...] = ()
    end: EndEvent | None = None


class Client(Protocol):
    """Where an answer goes. `finish` is called exactly once, last; no two calls overlap."""

    def send(self, update: Update) -> None:
        """Deliver a piece. Raising cancels the request."""

    def finish(self, update: Update) -> None:
        """Deliver the last piece, or the error in `update.end`, and close the response."""

    def cancelled(self) -> bool:
        """True once the client has gone or cancelled."""


class Session:
    """State of an open request. The engine's lock guards `cancelled`; the rest belongs to one thread at a time."""

    def __init__(self, seq: int, query: Query, client: Client, arrival: float) -> None:
        self.seq = seq
        self.query = query
        self.progress = Progress(query.id, query.priority, arrival)
        self.media: tuple[int, ...] = ()
        self.cancelled = False
        self.fault: tuple[EndReason, str] | None = None  # why a piece of the answer is missing
        self._client = client
        self._text: TextStream | None = None
        self._gate = threading.Lock()  # a response must not be asked about or written to once it is closed
        self._finished = False

    def begin(self, prepared: Prepared, tokenizer: Tokenizer) -> None:
        """Intake is done."""
        request = prepared.request
        self.media = tuple(prepared.media)
        self.progress.priority = request.priority
        self.progress.prompt, self.progress.input_tokens = prepared.prompt, len(request.tokens)
        self._text = TextStream(tokenizer, prepared.stop, request.sampling.min_tokens)

    @property
    def stopped(self) -> bool:
        """A stop string has been found."""
        return self._text is not None and self._text.stopped

    def push(self, tokens: Sequence[TokenEvent], now: float) -> None:
        """Detokenise and deliver. Tokens behind a stop string or a fault are dropped."""
        assert self._text is not None, "tokens come after intake"
        progress = self.progress
        progress.first_token = now if progress.first_token is None else progress.first_token
        progress.last_token = now
        text, taken = "", []
        try:
            for token in tokens:
                if self.stopped or self.fault:
                    break
                text += self._text.push(token.token)
                taken.append(token)
        except Exception as error:
            self._fail(error)
        if taken and not self._call(Update(progress, text, tuple(taken))):
            self.fault = ("cancelled", "the client cannot be reached")

    def last_update(self, end: EndEvent) -> Update:
        """What to finish with. A stop string completes the answer, a fault spoils it, whatever the core says."""
        text = ""
        try:
            text = self._text.flush() if self._text else ""
        except Exception as error:
            self._fail(error)
        if self.fault:
            end = msgspec.structs.replace(end, reason=self.fault[0], message=self.fault[1])
        elif self.stopped:
            end = msgspec.structs.replace(end, reason="stop", message="")
        return Update(self.progress, text, end=end)

    def _fail(self, error: Exception) -> None:
        logger.exception("request '%s': its tokens could not be turned into text", self.query.id)
        self.fault = ("internal", f"detokenisation failed ({type(error).__name__}: {error}); see the server's log")

    def finish(self, update: Update) -> None:
        """Deliver the last update."""
        self._call(update)

    def poll(self) -> bool:
        """True if the client has cancelled, or cannot even be asked. Never asks a finished response."""
        with self._gate:
            try:
                return not self._finished and self._client.cancelled()
            except Exception as error:
                logger.warning("request '%s': its client cannot be reached: %s", self.query.id, error)
                return True

    def _call(self, update: Update) -> bool:
        with self._gate:
            self._finished = update.end is not None
            deliver = self._client.finish if self._finished else self._client.send
            try:
                deliver(update)
            except Exception as error:
                logger.warning("request '%s': its client cannot be reached: %s", self.query.id, error)
                return False
        return True
