"""The measuring commands say what is wrong, without a traceback."""

from pathlib import Path

import pytest
from epd_client.cli import app
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
MIX = str(ROOT / "deploy" / "workloads" / "text.yaml")
OUT = ["--out", "/nowhere/profile.yaml"]
NOWHERE = ["--url", "127.0.0.1:1"]


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
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output
