"""One real Triton server for all tests of a session: the repository's own models, CPU configurations, digits-vl.

There is no skipping: where no server can be started, the tests fail and the error says what is missing.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from epd_client.client import Client
from epd_client.launch import Server

from tests.triton.helpers import wait_until_idle

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    with Server(ROOT / "model_repository", config_name="cpu") as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """The shared server; a test must leave it running, with all pools empty."""
    yield shared_server
    assert shared_server.running(), f"the server died; log: {shared_server.log}"
    wait_until_idle(shared_server)


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.grpc) as client:
        yield client
