"""The same code in other topologies, on real servers: same answers; emulated instances: the same protocol."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from epd_client.client import Client
from epd_client.configure import parse_topology, write_repository
from epd_client.control import encodes_apart, health
from epd_client.launch import Server
from epd_scheduler.profile import EncodeCost, ForwardCost, MigrateCost, Profile, save_profile

from models import digits
from tests.triton.helpers import metrics, stubs, wait_for, wait_until_idle

SOURCE = Path(__file__).resolve().parents[2] / "model_repository"


@pytest.mark.parametrize(("topology", "stages", "apart"), [("2E1P2D", 1, True), ("1E1PD", 2, True), ("1EPD", 1, False)])
def test_right_answers_in_every_topology(topology: str, stages: int, apart: bool, tmp_path: Path) -> None:
    write_repository(SOURCE, tmp_path / "repository", parse_topology(topology, stages=stages))
    scans, labels = digits.heldout()
    with Server(tmp_path / "repository") as server, Client(server.grpc) as client:

        def ask(first: int) -> str:
            images = [digits.render(scan) for scan in scans[first : first + 4]]
            return client.ask(text=digits.QUESTION, images=images, sampling={"max_tokens": 8}).text

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(0, 64, 4)))
        assert encodes_apart(server.grpc) == apart
        wait_until_idle(server)
    right = ["".join(map(str, labels[first : first + 4])) for first in range(0, 64, 4)]
    assert answers == right


def test_health_tells_a_lost_worker_whose_work_another_does(tmp_path: Path) -> None:
    write_repository(SOURCE, tmp_path / "repository", parse_topology("2E1PD"))
    with Server(tmp_path / "repository") as server:
        assert all(check.ok for check in health(server.grpc))
        os.kill(stubs(server)["encoder_1"], signal.SIGKILL)
        checks = {check.name: check for check in health(server.grpc)}
    assert [name for name, check in checks.items() if not check.ok] == ["model encoder_1"]
    assert "epd reload encoder_1" in checks["model encoder_1"].detail
    assert "encode on encoder" in checks["request"].detail


def test_emulated_5e1p2d_takes_the_time_of_the_cost_model(tmp_path: Path) -> None:
    """One image of 4 rows: 2 s to encode; all requests' images are spread over five encoders."""
    profile = Profile("none", "none", EncodeCost(overhead=2.0), ForwardCost(overhead=0.01), 1, 1, MigrateCost(0.01))
    save_profile(profile, tmp_path / "profile.yaml")
    write_repository(SOURCE, tmp_path / "repository", parse_topology("5E1P2D"), emulate=tmp_path / "profile.yaml")
    scans, _ = digits.heldout()
    with Server(tmp_path / "repository") as server, Client(server.grpc) as client:

        def ask(index: int) -> list[tuple[str, float, float, str]]:
            images = [digits.render(scans[index])]
            answer = client.ask(
                text=digits.QUESTION, images=images, sampling={"max_tokens": 4, "ignore_eos": True}, timeline=True
            )
            assert answer.num_output_tokens == 4
            return [(span.name, span.start, span.end, span.instance) for span in answer.timeline.spans]

        ask(0)
        emulated = [check.name for check in health(server.grpc) if "EMULATED" in check.detail]
        wait_for(lambda: metrics(server)["epd_emulated_instances"] == 8, "the metric tells emulated instances")
        with ThreadPoolExecutor(5) as pool:
            timelines = list(pool.map(ask, range(1, 6)))
    assert len(emulated) == 8  # all but the orchestrator
    encodes = [span for spans in timelines for span in spans if span[0] == "encode"]
    assert len({instance for *_, instance in encodes}) == 5
    assert all(end - start == pytest.approx(2.0, abs=0.01) for _, start, end, _ in encodes)
