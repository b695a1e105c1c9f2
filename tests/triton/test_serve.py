"""`epd serve` as a process of its own, told to stop in the middle of a load."""

from __future__ import annotations

import http.client as http_client
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from epd_client.client import Client

from tests.triton.conftest import ROOT
from tests.triton.load import Load

LONG = 400  # tokens of an answer that is under way


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def test_sigterm_lets_open_requests_finish() -> None:
    """And ends in good order, though an HTTP connection that nobody closes keeps Triton waiting."""
    http, grpc, metrics = map(str, free_ports(3))
    command = [str(Path(sys.executable).parent / "epd"), "serve", "--http-port", http, "--grpc-port", grpc]
    serving = subprocess.Popen([*command, "--metrics-port", metrics], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert serving.stdout is not None
    try:
        while "SIGTERM stops" not in (line := serving.stdout.readline()):
            assert line, "it has ended"
        with Load(f"127.0.0.1:{grpc}", users=6) as load, Client(f"127.0.0.1:{grpc}", timeout_s=60) as client:
            load.wait_for(20)
            idle = http_client.HTTPConnection("127.0.0.1", int(http))
            idle.request("GET", "/v2/health/ready")
            assert idle.getresponse().read() == b""
            long = client.generate("a", sampling={"max_tokens": LONG, "ignore_eos": True})
            tokens = next(long).num_output_tokens
            told = time.monotonic()
            serving.send_signal(signal.SIGTERM)
            tokens += sum(chunk.num_output_tokens for chunk in long)
            assert serving.wait(60) == 0
    finally:
        serving.kill()
    assert tokens == LONG
    open_then = [result for result in load.results if result.begin < told - 0.1 and result.end > told]
    assert all(result.right for result in open_then), open_then
    assert {result.error.code for result in load.results if result.error} <= {"UNAVAILABLE"}
