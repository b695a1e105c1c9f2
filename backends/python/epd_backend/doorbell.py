"""Ends a worker's wait for outcomes early, so that an exchange may wait long and a new plan is submitted at once.

A call of a worker that is under way takes no second message, and Triton has no way to interrupt it. Without this the
orchestrator would have to call every few milliseconds for as long as it may have another plan. Each call wakes half a
dozen threads, on cores that have better things to do: on two cores a forward took 15 to 20 % longer.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time


class Doorbell:
    """A datagram socket with a name that the kernel chooses, and forgets with it: no file, no port.

    `clear` and `wait` do nothing once it is closed.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind("")  # autobind of unix(7): NUL and five hexadecimal digits
        self._in_use = threading.Lock()
        self.name = self._socket.getsockname()[1:].decode()

    def clear(self) -> None:
        """Forget earlier rings. Those that come between this and `wait` end it at once."""
        with contextlib.suppress(OSError):  # no more, or closed
            while True:
                self._socket.recv(1)

    def wait(self, seconds: float) -> bool:
        """Until somebody rings, `seconds` at most. True if somebody has."""
        with self._in_use:
            if self._socket.fileno() < 0:
                return False
            bell = select.poll()  # select.select takes no descriptor above 1023: a worker inherits Triton's connections
            bell.register(self._socket, select.POLLIN)
            whole = int(1e3 * seconds)  # it would round parts of a millisecond up
            if bell.poll(whole):
                return True
            time.sleep(max(0.0, seconds - 1e-3 * whole))
            return bool(bell.poll(0))

    def close(self) -> None:
        """Wake whoever waits; give the name back."""
        ring(self.name)
        with self._in_use:
            self._socket.close()


def ring(name: str) -> None:
    """Wake whoever waits at the bell of that name, in this process or another of this host; nothing if it is gone."""
    with contextlib.suppress(OSError):  # gone; or rung so often that there is no room for more
        _sender.sendto(b"", f"\0{name}")


_sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
