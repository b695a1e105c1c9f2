"""Requests are cancelled in each phase, in each way a client can go: memory comes back, neighbours notice nothing.

Small batches make each phase last for seconds, and the server's own counters prove afterwards which phase it was: what
comes later in a request's life has not happened.
"""

from __future__ import annotations

import base64
import gc
import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from epd_client.client import Client, EpdError
from epd_client.launch import Server
from epd_client.tensors import encode_image
from PIL import Image

from tests.triton.conftest import ROOT
from tests.triton.helpers import metrics, wait_for, wait_until_idle
from tests.triton.load import READING, reading

CONFIGURATION = f"""
model: {ROOT / "models" / "digits-vl"}
scheduler: {{ overlap: none, encode_tokens: 1, token_budget: 8 }}
embedding: {{ blocks: 1024 }}
limits: {{ context: 16384 }}
"""
IMAGES = 14
SIDE, ROWS = 896, 1024  # pixels and embedding rows of an image
WORDS = 3500  # two tokens each

PREFILLING: dict[str, Any] = {"text": "1 " * WORDS, "sampling": {"max_tokens": 4}}
DECODING: dict[str, Any] = {"text": "1", "sampling": {"max_tokens": 2000, "ignore_eos": True}}
QUEUED: dict[str, Any] = {"text": "2", "sampling": {"max_tokens": 2000, "ignore_eos": True}}

# A client in a process of its own. It reads arguments of `generate`, images as base64, and asks.
ASKING = """
import base64, json, sys
from epd_client.client import Client
print("ready", flush=True)
arguments = json.loads(sys.stdin.readline())
arguments["images"] = [base64.b64decode(image) for image in arguments.get("images", ())]
for _ in Client(sys.argv[1]).generate(**arguments):
    pass
"""

# A client that ends with an answer not read to its end.
ENDING = """
import sys
from epd_client.client import Client
answer = Client(sys.argv[1]).generate("1", sampling={"max_tokens": 2000, "ignore_eos": True})
print(next(answer).num_output_tokens)
"""

Leave = Callable[[], None]
Begin = Callable[[dict[str, Any]], Leave]


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    configuration = tmp_path_factory.mktemp("slow") / "epd.yaml"
    configuration.write_text(CONFIGURATION)
    with Server(ROOT / "model_repository", config_name="cpu", env={"EPD_CONFIG": str(configuration)}) as server:
        yield server


@pytest.fixture
def server(slow_server: Server) -> Iterator[Server]:
    wait_until_idle(slow_server)
    yield slow_server
    assert slow_server.running(), f"the server died; log: {slow_server.log}"
    wait_until_idle(slow_server)


class Counters:
    """What the server has counted since this was made: tokens by stage, requests cancelled and taken in."""

    NAMES: ClassVar = {
        **{stage: f'epd_tokens_total{{stage="{stage}"}}' for stage in ("encode", "prefill", "decode")},
        "cancelled": 'epd_requests_total{reason="cancelled"}',
    }

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before = metrics(server)

    def __getitem__(self, what: str) -> float:
        name = self.NAMES[what]
        return metrics(self._server).get(name, 0.0) - self._before.get(name, 0.0)

    @property
    def taken_in(self) -> float:
        """Requests that wait, run, or have ended since."""
        return _requests(metrics(self._server)) - _requests(self._before)


def _requests(values: dict[str, float]) -> float:
    prefixes = ("epd_requests_waiting", "epd_requests_running", "epd_requests_total")
    return sum(value for name, value in values.items() if name.startswith(prefixes))


def by_cancelling(server: Server) -> Iterator[Begin]:
    """gRPC: the stream is cancelled."""
    with Client(server.grpc) as client:
        yield lambda arguments: client.generate(**arguments).cancel


def by_forgetting(server: Server) -> Iterator[Begin]:
    """gRPC: nobody refers to the answer any more, as after a `break` out of its loop."""
    with Client(server.grpc) as client:

        def begin(arguments: dict[str, Any]) -> Leave:
            held = [client.generate(**arguments)]
            return held.clear

        yield begin


def by_dying(server: Server) -> Iterator[Begin]:
    """gRPC: the client's process is killed."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", ASKING, server.grpc], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "ready\n"

        def leave() -> None:
            assert process.poll() is None, "the client's process has ended by itself"
            process.kill()

        def begin(arguments: dict[str, Any]) -> Leave:
            print(json.dumps({**arguments, "images": as_base64(arguments)}), file=process.stdin, flush=True)
            return leave

        yield begin
        process.kill()


def by_disconnecting(server: Server) -> Iterator[Begin]:
    """HTTP: the connection is closed."""
    connection = http.client.HTTPConnection(server.http, timeout=60)

    def begin(arguments: dict[str, Any]) -> Leave:
        body = {
            "text_input": arguments["text"],
            "image": as_base64(arguments),
            "stream": True,
            "sampling_parameters": json.dumps(arguments["sampling"]),
        }
        if not body["image"]:
            del body["image"]
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v2/models/epd_ensemble/generate_stream", json.dumps(body), headers)
        return connection.close

    yield begin
    connection.close()


def as_base64(arguments: dict[str, Any]) -> list[str]:
    return [base64.b64encode(encode_image(image)).decode() for image in arguments.get("images", ())]


@pytest.fixture(params=[by_cancelling, by_forgetting, by_dying], ids=lambda way: way.__name__)
def begin(request: pytest.FixtureRequest, server: Server) -> Iterator[Begin]:
    """Sends a request; what it returns leaves it."""
    yield from request.param(server)


@pytest.fixture
def begin_http(server: Server) -> Iterator[Begin]:
    yield from by_disconnecting(server)


def encoding() -> dict[str, Any]:
    """Arguments of a request that is long in encoding; never seen before, so that no embedding is there already."""
    pixels = np.random.default_rng().integers(0, 256, (IMAGES, SIDE, SIDE, 3), np.uint8)
    return {"text": "?", "images": [Image.fromarray(each) for each in pixels], "sampling": {"max_tokens": 4}}


def test_queued(server: Server, begin: Begin) -> None:
    count = Counters(server)
    with Client(server.grpc) as client:
        ahead = [client.generate(**PREFILLING) for _ in range(2)]  # take every token of every batch
        wait_for(lambda: count["prefill"] > 0, "the requests ahead do not start")
        leave = begin(QUEUED)
        wait_for(lambda: count.taken_in == 3, "the third request is not taken in")
        leave()
        tokens = [list(generation)[-1].num_input_tokens for generation in ahead]
    wait_until_idle(server)
    assert count["prefill"] == sum(tokens) >= 4 * WORDS  # none of the request that was queued
    assert count["cancelled"] == 1


def test_encoding(server: Server, begin: Begin) -> None:
    count = Counters(server)
    leave = begin(encoding())
    wait_for(lambda: count["encode"] > 0, "nothing is encoded")
    with Client(server.grpc) as client:
        neighbour = client.generate(**reading(3))
        leave()
        assert "".join(chunk.text for chunk in neighbour) == READING[:3]
    wait_until_idle(server)
    assert count["encode"] < IMAGES * ROWS
    assert count["prefill"] < 100  # the neighbour's alone
    assert count["cancelled"] == 1


def test_prefilling(server: Server, begin: Begin) -> None:
    count = Counters(server)
    leave = begin(PREFILLING)
    wait_for(lambda: count["prefill"] > 0, "nothing is prefilled")
    with Client(server.grpc) as client:
        neighbour = client.generate(**reading(3))
        leave()
        assert "".join(chunk.text for chunk in neighbour) == READING[:3]
    wait_until_idle(server)
    assert count["prefill"] < 2 * WORDS
    assert count["cancelled"] == 1


def test_decoding(server: Server, begin: Begin) -> None:
    leave_while_decoding(server, begin)


def test_decoding_over_http(server: Server, begin_http: Begin) -> None:
    leave_while_decoding(server, begin_http)


def leave_while_decoding(server: Server, begin: Begin) -> None:
    count = Counters(server)
    leave = begin(DECODING)
    wait_for(lambda: count["decode"] > 10, "nothing is decoded")
    with Client(server.grpc) as client:
        neighbour = client.generate(**reading(6))
        leave()
        assert "".join(chunk.text for chunk in neighbour) == READING
    wait_until_idle(server)
    assert count["decode"] < 2000
    assert count["cancelled"] == 1


def test_http_before_the_first_token(server: Server, begin_http: Begin) -> None:
    """Triton does not listen to the connection until it writes: the request ends soon after its first token."""
    count = Counters(server)
    leave = begin_http({**PREFILLING, "sampling": {"max_tokens": 1000, "ignore_eos": True}})
    wait_for(lambda: count["prefill"] > 0, "nothing is prefilled")
    leave()
    wait_until_idle(server, timeout_s=60)
    assert count["decode"] < 1000
    assert count["cancelled"] == 1


def test_a_program_ends_though_an_answer_does_not(server: Server) -> None:
    count = Counters(server)
    ended = subprocess.run([sys.executable, "-c", ENDING, server.grpc], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1\n", "")
    wait_for(lambda: count["cancelled"] > 0, "the request goes on")  # it was open too short to show in the gauges
    wait_until_idle(server)
    assert count["decode"] < 2000
    assert count["cancelled"] == 1


def test_no_thread_stays(server: Server) -> None:
    """Neither of answers that are cancelled nor of those that are forgotten, in reference cycles too."""
    before = threading.active_count()
    with Client(server.grpc) as client:
        for _ in range(10):
            client.generate(**QUEUED).cancel()
            client.generate(**QUEUED)
            cycle: list[Any] = [client.generate(**QUEUED)]
            cycle.append(cycle)
        del cycle
        gc.collect()
        wait_until_idle(server)
    wait_for(lambda: threading.active_count() <= before, f"threads stay: {threading.enumerate()}")


def test_closing_a_client_is_an_error_for_those_who_still_read(server: Server) -> None:
    with Client(server.grpc) as client:
        answer = client.generate(**DECODING)
        next(answer)
    with pytest.raises(EpdError) as error:
        list(answer)
    assert error.value.code == "CANCELLED"
    assert list(answer) == []
