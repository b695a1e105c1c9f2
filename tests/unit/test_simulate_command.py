from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from epd_client import bench
from epd_client.cli import app
from epd_scheduler.profile import load_profile, save_profile
from epd_scheduler.simulation import roofline
from epd_scheduler.simulation.scenario import load_scenario
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]


def run(*arguments: str):
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_a_shipped_scenario_gives_a_table_and_a_file_that_plots_read(tmp_path: Path) -> None:
    out = tmp_path / "runs.json"
    workload = str(ROOT / "deploy/workloads/heavy.yaml")
    result = run(
        str(ROOT / "deploy/scenarios/rserve.yaml"),
        *("--workload", workload, "--rate", "1", "--rate", "2", "--requests", "50", "--out", str(out)),
    )
    assert result.exit_code == 0, result.output
    assert "rserve (simulated): heavy" in result.output
    runs = bench.read([out])
    assert [len(each.results) for each in runs] == [50, 50]
    assert runs[0].summary.overall.failed == 0
    assert runs[0].rate * 2 == runs[1].rate


def test_every_shipped_scenario_loads() -> None:
    for path in (ROOT / "deploy/scenarios").glob("*.yaml"):
        assert load_scenario(path).scenario.name == path.stem


def test_faults_of_a_scenario_are_named(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text("name: x\nprofile: nowhere.yaml\nvision: {type: grid}\ninstances: [{roles: [encode]}]\n")
    result = run(str(path))
    assert result.exit_code == 1
    assert "nowhere.yaml" in result.output
    save_profile(load_profile(ROOT / "deploy/profiles/minicpm-v-2.6-a100.yaml"), tmp_path / "nowhere.yaml")
    result = run(str(path), "--workload", str(ROOT / "deploy/workloads/text.yaml"))
    assert result.exit_code == 1
    assert "no instance for decode, prefill" in result.output
    path.write_text("instances: 3")
    assert "deploy/scenarios" in run(str(path)).output


def test_shipped_profiles_are_those_that_the_roofline_gives(tmp_path: Path) -> None:
    roofline.main(str(tmp_path))
    made = {path.name: load_profile(path) for path in tmp_path.iterdir()}
    shipped = {path.name: load_profile(path) for path in (ROOT / "deploy/profiles").iterdir() if path.name in made}
    assert shipped == made
    assert all("Computed, not measured" in profile.source for profile in made.values())


def test_roofline_of_a_known_model() -> None:
    """Qwen2.5-VL-72B on H100: 8,192 tokens are 1.15 PFLOP, and the weights are read in 52 ms."""
    profile = roofline.make_profile(roofline.MODELS["qwen2.5-vl-72b"], roofline.GPUS["h100"])
    assert profile.kv_bytes_token == 2 * 80 * 8 * 128 * 2
    assert 2.6 < profile.forward.seconds([(0, 8192)]) < 3.0
    assert 0.052 < profile.forward.seconds([(100, 1)]) < 0.054
    four = roofline.make_profile(roofline.MODELS["qwen2.5-vl-72b"], roofline.GPUS["h100"], ways=4)
    assert 1 / 4 < four.forward.seconds([(0, 8192)]) / profile.forward.seconds([(0, 8192)]) < 1 / 3
    assert four.encode == profile.encode


def test_the_server_does_not_import_the_simulator() -> None:
    code = (
        "import sys, epd_scheduler.core, epd_orchestrator.engine; print([m for m in sys.modules if 'simulation' in m])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
