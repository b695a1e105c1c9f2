"""Rings reach who waits, from anywhere on the host; nothing is left of a bell."""

from __future__ import annotations

import fcntl
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from epd_backend.doorbell import Doorbell, ring

LONG = 60.0


@pytest.fixture
def bell() -> Iterator[Doorbell]:
    made = Doorbell()
    yield made
    made.close()


def test_another_process_ends_the_wait(bell: Doorbell) -> None:
    script = f"from epd_backend.doorbell import ring; ring({bell.name!r})"
    with subprocess.Popen([sys.executable, "-c", script]):
        assert bell.wait(LONG)


def test_who_is_not_rung_waits_no_longer_than_asked(bell: Doorbell) -> None:
    begin = time.monotonic()
    assert not bell.wait(0.05)
    assert time.monotonic() - begin >= 0.05


def test_rings_before_clear_are_forgotten(bell: Doorbell) -> None:
    for _ in range(1000):  # more than the kernel keeps
        ring(bell.name)
    bell.clear()
    assert not bell.wait(0.01)
    ring(bell.name)
    assert bell.wait(LONG)


def test_a_bell_may_have_any_descriptor(bell: Doorbell) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    low = bell._socket
    bell._socket = socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1024))
    low.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not bell.wait(0.01)
    ring(bell.name)
    assert bell.wait(LONG)


def test_closing_wakes_and_gives_the_name_back() -> None:
    bell = Doorbell()
    waiter = threading.Thread(target=bell.wait, args=(LONG,))
    waiter.start()
    time.sleep(0.1)
    begin = time.monotonic()
    bell.close()
    waiter.join()
    assert time.monotonic() - begin < LONG / 2
    with open("/proc/net/unix") as sockets:
        assert f"@{bell.name}\n" not in sockets.read()
    ring(bell.name)
    bell.clear()
    assert not bell.wait(LONG)
