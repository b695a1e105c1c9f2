"""The measuring commands say what is wrong, without a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest
from epd_client.cli import app
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
MIX = str(ROOT / "deploy" / "workloads" / "text.yaml")
OUT = ["--out", "/nowhere/profile.yaml"]
NOWHERE = ["--url", "127.0.0.1:1"]
NEEDS = {"profile": "sklearn", "plot": "matplotlib"}  # beside what the client alone needs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--workload", MIX, *NOWHERE], "no server answers at 127.0.0.1:1"),
        (["bench", "--workload", "/nowhere.yaml", *NOWHERE], "see deploy/workloads for mixes that work"),
        (
            ["profile", *OUT, "--config", str(ROOT / "deploy" / "epd.yaml"), "--workload", MIX, *NOWHERE],
            "no server answers at 127.0.0.1:1",
        ),
        (["profile", *OUT, "--config", "/nowhere.yaml", *NOWHERE], "/nowhere.yaml"),
        (["plot", "/nowhere.json"], "give files that `epd bench` has written"),
    ],
)
def test_errors(arguments: list[str], message: str) -> None:
    if needed := NEEDS.get(arguments[0]):
        pytest.importorskip(needed)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("arguments", [["profile", *OUT, *NOWHERE], ["plot", "/nowhere.json"]], ids=list(NEEDS))
def test_what_measuring_needs_beside_the_client_is_named(arguments: list[str]) -> None:
    code = f"import sys; sys.modules |= dict.fromkeys({[*NEEDS.values()]}); from epd_client.cli import app; app()"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "install it with: pip install 'triton-epd[bench]'" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
