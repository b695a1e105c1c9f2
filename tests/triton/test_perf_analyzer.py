"""Triton's own load generator: images at Poisson arrivals, every one answered."""

from __future__ import annotations

import base64
import csv
import json
import os
import re
import site
import subprocess
import sys
from pathlib import Path

import pytest
from epd_client.launch import Server
from epd_client.tensors import encode_image

from models import digits
from tests.triton.helpers import metrics, wait_until_idle

PERF_ANALYZER = Path(sys.executable).parent / "perf_analyzer"  # of the tritonclient wheel
CUDA_RUNTIME = [Path(each, "nvidia", "cuda_runtime", "lib") for each in site.getsitepackages()]
RATE = 4  # requests a second
REQUESTS = 24
REMEDY = {
    "libb64": "apt-get install libb64-0d",
    "libcudart": f"{sys.executable} -m pip install nvidia-cuda-runtime-cu12",
}


@pytest.fixture
def environment() -> dict[str, str]:
    """The environment that `perf_analyzer` runs in; skips where a library is missing."""
    path = os.pathsep.join([*map(str, CUDA_RUNTIME), os.environ.get("LD_LIBRARY_PATH", "")])
    environment = {**os.environ, "LD_LIBRARY_PATH": path}
    command = ["ldd", PERF_ANALYZER]
    libraries = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    if missing := re.findall(r"(\S+) => not found", libraries.stdout):
        commands = [command for name, command in REMEDY.items() if any(name in library for library in missing)]
        pytest.skip(f"perf_analyzer misses {', '.join(missing)}; run: {'; '.join(commands)}")
    return environment


def content(value: bytes) -> dict[str, object]:
    """A BYTES tensor with one element: its length, then the element."""
    return {"content": {"b64": base64.b64encode(len(value).to_bytes(4, "little") + value).decode()}, "shape": [1]}


def test_poisson_image_load(server: Server, environment: dict[str, str], tmp_path: Path) -> None:
    scans, _ = digits.heldout()
    requests = [
        {
            "text_input": content(digits.QUESTION.encode()),
            "image": content(encode_image(digits.row(scans[i : i + 8], 112))),
            "stream": {"content": [True], "shape": [1]},
            "sampling_parameters": content(json.dumps({"max_tokens": 16}).encode()),
        }
        for i in range(0, 64, 8)
    ]
    data, report = tmp_path / "data.json", tmp_path / "report.csv"
    data.write_text(json.dumps({"data": requests}))
    before = metrics(server)
    result = subprocess.run(
        [
            *(PERF_ANALYZER, "-m", "epd_ensemble", "-u", server.grpc, "-i", "grpc", "--streaming", "--async"),
            *("--input-data", data, "-f", report),
            *("--request-rate-range", str(RATE), "--request-distribution", "poisson"),
            *("--request-count", str(REQUESTS), "-s", "999"),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert "Failed" not in output, output
    (row,) = csv.DictReader(report.read_text().splitlines())
    assert float(row["Inferences/Second"]) > 0
    wait_until_idle(server)
    after = metrics(server)
    ended = {
        name: value - before.get(name, 0.0) for name, value in after.items() if name.startswith("epd_requests_total")
    }
    assert sum(ended.values()) >= REQUESTS
    unsuccessful = {name for name, value in ended.items() if value and not re.search('"(stop|length)"', name)}
    assert not unsuccessful, ended
