"""Which processes of the server are older than the orchestrator's, told by their command lines; which have ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from epd_backend import procfs

LOOK = "from epd_orchestrator import process; print(process.older(['epd_ensemble', 'decode', 'decode_1', 'encoder']))"


def stub(directory: Path, instance: str) -> subprocess.Popen[bytes]:
    """A process with the command line of Triton's, which runs until its input ends."""
    model = directory / "1" / "model.py"
    model.parent.mkdir(parents=True)
    model.write_text("read line")
    arguments = ["/opt/backends/triton_python_backend_stub", model, "region_1_2", "1048576", "1", instance, "DEFAULT"]
    return subprocess.Popen(arguments, executable="/bin/sh", stdin=subprocess.PIPE)


@pytest.mark.parametrize("fetched", [False, True], ids=["in the repository", "fetched to a temporary directory"])
def test_older_processes_are_found_by_model(tmp_path: Path, fetched: bool) -> None:
    instances = {"decode": "decode_0_0", "decode_1": "decode_1_0_0", "another": "another_0_0"}
    running = {
        model: stub(tmp_path / (f"folder{number}" if fetched else model), instance)
        for number, (model, instance) in enumerate(instances.items())
    }
    time.sleep(0.05)  # several ticks of the clock that tells who is older
    found = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True, timeout=60).stdout
    for process in running.values():
        process.communicate(timeout=10)
    decode, decode_1 = ({running[model].pid} for model in ("decode", "decode_1"))
    assert found.strip() == str({"epd_ensemble": set(), "decode": decode, "decode_1": decode_1, "encoder": set()})


def test_a_process_is_alive_until_it_ends(tmp_path: Path) -> None:
    shell = tmp_path / ") Z 1 ("  # the name is a field of what is read
    shell.symlink_to("/bin/sh")
    process = subprocess.Popen(["sh", "-c", "read line"], executable=shell, stdin=subprocess.PIPE)
    stat = procfs.stat(process.pid)
    assert (stat.alive, stat.parent) == (True, os.getpid())
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not procfs.stat(process.pid).alive
    process.communicate(timeout=10)
    with pytest.raises(OSError, match="No such"):
        procfs.stat(process.pid)
