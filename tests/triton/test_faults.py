"""Processes die in the middle of a load: nothing hangs, no answer is wrong, errors name the remedy, all comes back."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc
from epd_client import control, demo
from epd_client.client import Client, EpdError
from epd_client.launch import Server
from tritonclient.utils import InferenceServerException

from models import digits
from tests.triton.conftest import ROOT
from tests.triton.helpers import left_over, metrics, shared_memory, stubs, wait_for, wait_until_idle
from tests.triton.load import READING, TEXT_ONLY, Load, reading

STAGES = {"encoder": "encode", "prefill": "prefill", "decode": "decode"}


STALL_S = 10


def start(log: Path | None = None, **environment: str) -> Server:
    """`log` for a server that loses a process: it does not stop in good order, so that its log is kept."""
    return Server(ROOT / "model_repository", config_name="cpu", env=environment, log=log)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "epd.yaml"
    path.write_text(f"model: {digits.CHECKPOINT}\nlimits: {{stall_seconds: {STALL_S}}}\n")
    return path


@pytest.fixture(scope="module")
def faulty_server(config: Path) -> Iterator[Server]:
    with start(config.with_name("workers.log"), EPD_CONFIG=str(config)) as server:
        yield server
        names = shared_memory(server)
    assert names
    assert left_over(names) == set()


@pytest.fixture
def server(faulty_server: Server) -> Iterator[Server]:
    """A test must leave it with all models alive and all pools empty."""
    yield faulty_server
    assert faulty_server.running(), f"the server died; log: {faulty_server.log}"
    answers_again(faulty_server)
    wait_until_idle(faulty_server)


def kill(server: Server, model: str) -> float:
    """SIGKILL a model's process; returns when."""
    pid = stubs(server)[model]
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def assert_healthy(server: Server) -> None:
    """`epd health` finds nothing wrong, at the first attempt."""
    checks = control.health(server.grpc)
    assert all(check.ok for check in checks), checks


def answers_again(server: Server) -> None:
    """A request through every stage gets its right answer, at once or as soon as an instance has found itself."""

    def answered() -> bool:
        try:
            return client.ask(**reading(3)).text == READING[:3]
        except EpdError as error:
            assert error.code == "UNAVAILABLE", error  # noqa: PT017 - any other is a failure
            return False

    with Client(server.grpc, timeout_s=60) as client:
        wait_for(answered, "the server does not answer again")


@pytest.mark.parametrize("model", STAGES)
def test_a_worker_dies_under_load_and_comes_back(server: Server, model: str) -> None:
    with Load(server.grpc) as load:
        load.wait_for(10)
        died = kill(server, model)
        load.wait_for(5, since=died, right=False)
        if model == "encoder":
            load.wait_for(5, since=died, images=False)  # text goes on
        control.reload(server.grpc, model)
        assert_healthy(server)
        back = time.monotonic()
        load.wait_for(10, since=back, images=True)
        load.wait_for(5, since=back, images=False)
    failed = [result for result in load.results if not result.right]
    for result in failed:
        assert result.error is not None, f"a wrong answer: {result}"
        assert result.error.code == "UNAVAILABLE"
        assert f"no live instance for stage '{STAGES[model]}' (lost: {model})" in str(result.error)
        assert f"`epd reload {model}`" in str(result.error)
        assert result.end > died
        if model == "encoder":
            assert result.images


def test_a_worker_hangs_is_given_up_and_ended(server: Server) -> None:
    """Its blocks stay out of use while it might go on; since it does not come to rest, it is ended."""
    hanging = stubs(server)["prefill"]
    with Load(server.grpc) as load:
        load.wait_for(5)
        os.kill(hanging, signal.SIGSTOP)
        stopped = time.monotonic()
        load.wait_for(1, since=stopped, right=False)
        wait_for(lambda: "prefill" not in stubs(server), "the process is not ended")
        control.reload(server.grpc, "prefill")
        load.wait_for(10, since=time.monotonic())
    assert all(result.right or result.error for result in load.results)


def test_a_worker_that_hangs_while_nothing_runs_is_given_up_and_ended(server: Server) -> None:
    """The next request finds out; one that comes `stall_seconds` later has the process ended."""
    answers_again(server)
    wait_until_idle(server)
    os.kill(stubs(server)["decode"], signal.SIGSTOP)
    with Client(server.grpc, timeout_s=3 * STALL_S) as client:
        with pytest.raises(EpdError, match="stage 'decode'"):
            client.ask(**TEXT_ONLY)
        assert "decode" in stubs(server)
        time.sleep(STALL_S)
        with pytest.raises(EpdError, match="stage 'decode'"):
            client.ask(**TEXT_ONLY)
    wait_for(lambda: "decode" not in stubs(server), "the process is not ended")
    control.reload(server.grpc, "decode")


def test_a_worker_dies_again_and_again(server: Server) -> None:
    with Load(server.grpc, users=3) as load:
        for model in ("decode", "encoder", "prefill"):
            load.wait_for(3, since=time.monotonic())
            died = kill(server, model)
            load.wait_for(1, since=died, right=False)
            control.reload(server.grpc, model)
        load.wait_for(10, since=time.monotonic())
    assert all(result.right or result.error for result in load.results)


def test_all_workers_die_at_once(server: Server) -> None:
    with Load(server.grpc) as load:
        load.wait_for(5)
        died = max(kill(server, model) for model in STAGES)
        load.wait_for(10, since=died, right=False)
        for model in STAGES:
            control.reload(server.grpc, model)
        assert_healthy(server)
        load.wait_for(10, since=time.monotonic())
    assert all(result.right or result.error for result in load.results)


def test_a_lost_worker_is_found_without_load(server: Server) -> None:
    wait_until_idle(server)
    kill(server, "decode")
    with Client(server.grpc, timeout_s=30) as client, pytest.raises(EpdError, match="stage 'decode'") as error:
        client.ask(**TEXT_ONLY)
    assert error.value.code == "UNAVAILABLE"
    report = {check.name: check for check in control.health(server.grpc)}
    assert [name for name, check in report.items() if not check.ok] == ["model decode", "request"]
    assert "epd reload" in report["request"].detail
    control.reload(server.grpc, "decode")
    with Client(server.grpc, timeout_s=30) as client:
        assert client.ask(**TEXT_ONLY).text == demo.TEXT_ONLY_ANSWER  # the first request already


def test_a_live_worker_is_reloaded_under_load(server: Server) -> None:
    """Its plans are lost like those of a dead one; what does not fail is computed again, with the same tokens."""
    with Load(server.grpc) as load:
        load.wait_for(5)
        control.reload(server.grpc, "prefill")
        assert_healthy(server)
        load.wait_for(10, since=time.monotonic())
    assert all(result.right or result.error for result in load.results)


def test_a_live_orchestrator_is_reloaded_under_load(server: Server) -> None:
    """What is open is finished first: two orchestrators at a time would share the workers' memory and the metrics."""
    with Load(server.grpc) as load:
        load.wait_for(5)
        with tritonclient.grpc.InferenceServerClient(server.grpc) as triton:
            config = triton.get_model_config("epd_ensemble", as_json=True)["config"]
            config["parameters"]["changed"] = {"string_value": ""}  # else Triton does nothing
            with pytest.raises(InferenceServerException, match="serves 'epd_ensemble' already"):
                triton.load_model("epd_ensemble", config=json.dumps(config))  # in the place of the live one
        assert all(result.right for result in load.results)
        control.reload(server.grpc, "epd_ensemble")
        assert_healthy(server)
        load.wait_for(10, since=time.monotonic())
    failed = [result for result in load.results if not result.right]
    assert all(result.error and result.error.code == "UNAVAILABLE" for result in failed), failed
    assert all("epd_ensemble' is not loaded" in str(result.error) for result in failed), failed


def test_the_orchestrator_dies(config: Path) -> None:
    """Triton leaves open streams open: the clients' time limit ends them. New requests fail until it is reloaded."""
    with start(config.with_name("orchestrator.log"), EPD_CONFIG=str(config)) as server:
        answers_again(server)
        workers = {name: pid for name, pid in stubs(server).items() if name != "epd_ensemble"}
        open_ended: list[EpdError] = []

        def ask() -> None:
            try:
                with Client(server.grpc, timeout_s=15) as client:
                    client.ask("1", sampling={"max_tokens": 2000, "ignore_eos": True})
            except EpdError as error:
                open_ended.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_for(lambda: metrics(server).get("epd_requests_running", 0) > 0, "the request does not run")
        kill(server, "epd_ensemble")
        with Client(server.grpc, timeout_s=30) as client, pytest.raises(EpdError, match="epd reload epd_ensemble"):
            client.ask(**TEXT_ONLY)
        with pytest.raises(EpdError, match=r"decode is loaded again, but .* after 2 s: the process of model 'epd_en"):
            control.reload(server.grpc, "decode", take_up_s=2)
        workers["decode"] = stubs(server)["decode"]
        control.reload(server.grpc, "epd_ensemble")
        assert_healthy(server)
        assert {name: pid for name, pid in stubs(server).items() if name != "epd_ensemble"} == workers
        asking.join(60)
        assert [error.code for error in open_ended] == ["DEADLINE_EXCEEDED"]
        with Load(server.grpc) as load:
            load.wait_for(10)
        assert all(result.right for result in load.results)
        wait_until_idle(server)
        dies_beside_a_hanging_encoder(server)
        names = shared_memory(server)
    assert left_over(names) == set()


def dies_beside_a_hanging_encoder(server: Server) -> None:
    """It might still write embeddings for the old orchestrator: the new one waits, and ends it at last."""
    os.kill(stubs(server)["encoder"], signal.SIGSTOP)
    kill(server, "epd_ensemble")
    control.reload(server.grpc, "epd_ensemble")
    with Client(server.grpc, timeout_s=6 * STALL_S) as client:
        assert client.ask(**TEXT_ONLY).text == demo.TEXT_ONLY_ANSWER
        assert "encoder" not in stubs(server)
        control.reload(server.grpc, "encoder")
        answers_again(server)


def test_shutdown_under_load() -> None:
    """Open requests get an answer or an error, the exit is bounded and leaves nothing."""
    server = start()
    server.start()
    try:
        with Load(server.grpc, users=6, timeout_s=60) as load:
            load.wait_for(10)
            names, processes = shared_memory(server), [server.pid, *stubs(server).values()]
            begin = time.monotonic()
            status = server.stop()
            took = time.monotonic() - begin
    finally:
        server.stop()
    assert status is not None
    assert status >= 0  # not a crash; 1 if the workers took longer than the exit timeout
    assert took < 60
    assert all(result.right or result.error for result in load.results)
    said = [str(result.error) for result in load.results if result.error]
    assert all(re.search("server is stopping|server has ended the call|no server answers", each) for each in said), said
    assert left_over(names) == set()
    assert not [pid for pid in processes if os.path.exists(f"/proc/{pid}")]


def test_two_servers_side_by_side(server: Server) -> None:
    """Their arenas have the same devices and shapes, and are each their own."""
    with start() as other:
        names = shared_memory(other)
        assert names.isdisjoint(shared_memory(server))
        assert {name for name in names if name.startswith("epd_")}
        with Load(server.grpc, users=3) as load, Load(other.grpc, users=3) as other_load:
            load.wait_for(20)
            other_load.wait_for(20)
        assert all(result.right for result in load.results + other_load.results)
        with Load(server.grpc, users=3) as load:
            load.wait_for(3)
            other.stop()
            load.wait_for(10, since=time.monotonic())
        assert all(result.right for result in load.results)
    assert left_over(names) == set()
