"""What tests of the running server share."""

import contextlib
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from epd_client.launch import Server

# Gauges that are zero when no request is open and no block is held.
IDLE = ("epd_requests_waiting", "epd_requests_running", "epd_kv_usage", "epd_embedding_usage")


def metrics(server: Server) -> dict[str, float]:
    """The server's metrics: `name{labels}` -> value."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Poll until `condition()`; fails with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(0.05)


def wait_until_idle(server: Server, timeout_s: float = 30.0) -> None:
    """Wait until no request is open and all pools are empty; fails with the metrics that say otherwise."""
    held: dict[str, float] = {}

    def idle() -> bool:
        gauges = {name: value for name, value in metrics(server).items() if name.startswith(IDLE)}
        held.clear()
        held.update({name: value for name, value in gauges.items() if value})
        return not held

    wait_for(idle, f"the pools are not empty: {held}", timeout_s)


def stubs(server: Server) -> dict[str, int]:
    """Process ids of the models' Python stubs, by model."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
            command = (directory / "cmdline").read_text().split("\0")
            if parent == server.pid and command[0].endswith("triton_python_backend_stub"):
                found[Path(command[1]).parts[-3]] = int(directory.name)
    return found


def shared_memory(server: Server) -> set[str]:
    """Names of the files below /dev/shm that the server and its stubs have mapped."""
    names = set()
    for pid in (server.pid, *stubs(server).values()):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            _, found, name = line.partition("/dev/shm/")
            if found:
                names.add(name)
    return names


def left_over(names: set[str]) -> set[str]:
    """Those of `names` that are still in /dev/shm."""
    return {name for name in names if Path("/dev/shm", name).exists()}
