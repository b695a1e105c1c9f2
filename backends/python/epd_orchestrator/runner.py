"""One thread a worker instance: one blocking call at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from epd_scheduler import protocol

from epd_orchestrator.hub import Hub
from epd_orchestrator.link import HELLO_S, Call, Link

logger = logging.getLogger(__name__)

# (instance, packed Exchange, media bytes) -> packed Reply. Raises whatever says that the instance cannot be reached.
ExchangeFn = Callable[[str, bytes, bytes], bytes | memoryview]


class ServerStoppingError(ConnectionError):
    """The server refuses calls to all instances, for it stops."""


class Runner(threading.Thread):
    """Carries plans to an instance and outcomes back until the hub closes."""

    def __init__(self, hub: Hub, link: Link, exchange: ExchangeFn) -> None:
        super().__init__(name=f"runner-{link.name}", daemon=True)
        self._hub = hub
        self._link = link
        self._exchange = exchange

    def run(self) -> None:
        """The thread's body."""
        while True:
            try:
                if (call := self._hub.next_call(self._link)) is None:
                    return
                self._make(call)
            except Exception as error:  # a defect; with the instance given up, what it had to do is planned again
                logger.exception("thread '%s' failed and goes on", self.name)
                message = f"its thread failed ({type(error).__name__}: {error}); see the server's log"
                self._hub.take_failure(self._link, message)
                time.sleep(HELLO_S)  # else it may fail thousands of times a second; nor is there a call to make before

    def _make(self, call: Call) -> None:
        try:
            reply = protocol.decode_reply(self._exchange(self._link.name, protocol.encode(call.exchange), call.media))
        except Exception as error:  # whatever it is, the plans of this call have no outcome
            stopping = isinstance(error, ServerStoppingError)
            self._hub.take_failure(self._link, str(error) or type(error).__name__, stopping=stopping)
        else:
            self._hub.take_reply(self._link, call, reply)
