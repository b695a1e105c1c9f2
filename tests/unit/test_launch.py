"""The launcher, with a real server and a model of three lines."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from epd_client import control, install, shm
from epd_client.launch import LaunchError, Server, describe_exit, explain, still_loading

CONFIG = """
name: "pid"
backend: "python"
max_batch_size: 0
output [{ name: "PID" data_type: TYPE_INT64 dims: [ 1 ] }]
instance_group [{ kind: KIND_CPU count: 1 }]
"""
MODEL = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        if reason := os.environ.get("REASON_TO_FAIL"):
            raise RuntimeError(reason)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("PID", np.array([os.getpid()]))]) for _ in requests]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Path]:
    """A repository with one model. The test must leave neither processes nor shared memory behind."""
    (tmp_path / "models" / "pid" / "1").mkdir(parents=True)
    (tmp_path / "models" / "pid" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "models" / "pid" / "1" / "model.py").write_text(MODEL)
    yield tmp_path / "models"
    # Every process of a server has the repository in its command line, so none of another test's is counted.
    assert processes_that_name(str(tmp_path)) == []


def processes_that_name(text: str) -> list[str]:
    command = ["ps", "-eo", "pid=,stat=,args="]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [line for line in found.stdout.splitlines() if text in line and line.split()[1][0] != "Z"]


def regions_of(pid: int) -> set[str]:
    """The shared memory that a server has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split()[-1]).name for line in lines if shm.TRITON_PREFIX in line}


def stub_pid(url: str) -> int:
    with triton.InferenceServerClient(url) as client:
        return int(client.infer("pid", [], client_timeout=10).as_numpy("PID")[0])


def kill_stub(url: str) -> int:
    """Kill the process of the model, which a call then notices; returns its id."""
    pid = stub_pid(url)
    time.sleep(0.5)  # it comes to rest: killed in the middle of something it may hold a lock that Triton waits for
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(triton.InferenceServerException, match="not healthy"):
        stub_pid(url)
    return pid


def test_a_server_runs_and_ends_without_a_trace(repository: Path) -> None:
    with Server(repository) as server:
        assert len({server.http, server.grpc, server.metrics}) == 3
        pid, stub, log, regions = server.pid, stub_pid(server.grpc), server.log, regions_of(server.pid)
        assert regions
        environment = dict(
            item.split("=", 1) for item in Path(f"/proc/{stub}/environ").read_text().split("\0") if "=" in item
        )
        assert environment["OMP_WAIT_POLICY"] == "passive"
        assert environment["PATH"].startswith(f"{Path(sys.executable).parent}:")
    for gone in (f"/proc/{pid}", f"/proc/{stub}", log, *(f"/dev/shm/{name}" for name in regions)):
        assert not Path(gone).exists(), f"{gone} is left"


def test_a_killed_stub_comes_back_by_a_reload(repository: Path, tmp_path: Path) -> None:
    with Server(repository, log=tmp_path / "log") as server:
        dead = kill_stub(server.grpc)
        assert control.reload(server.grpc, "pid") < control.TAKE_UP_S  # it is no worker, and takes part in nothing
        assert stub_pid(server.grpc) != dead
        regions = regions_of(server.pid)
        assert len(regions) == 2  # that of the dead stub too
    assert not any(Path(f"/dev/shm/{name}").exists() for name in regions)


def test_a_killed_server_leaves_nothing_either(repository: Path) -> None:
    with Server(repository) as server:
        stub, regions = stub_pid(server.grpc), regions_of(server.pid)
        os.kill(server.pid, signal.SIGKILL)
    assert not any(Path(f"/dev/shm/{name}").exists() for name in regions)
    assert not Path(f"/proc/{stub}").exists() or Path(f"/proc/{stub}/stat").read_text().split()[2] == "Z"
    assert server.log.exists(), "the log of a server that died is kept"
    server.log.unlink()


def test_the_server_ends_with_its_launcher(repository: Path) -> None:
    program = f"""
import time
from epd_client.launch import Server
server = Server({str(repository)!r})
server.start()
print(server.pid, server.log, server._directory.path, flush=True)
time.sleep(60)
"""
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pid, log, directory = launcher.stdout.readline().split()
    with Server(repository):
        assert Path(directory).exists(), "it is in use"
    launcher.kill()
    launcher.wait(10)
    launcher.stdout.close()
    deadline = time.monotonic() + 20
    while processes_that_name(str(repository)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert int(pid) > 0
    Path(log).unlink()
    assert Path(directory).exists()
    with Server(repository):
        assert not Path(directory).exists(), "what a killed launcher left behind is removed by the next"


def test_serve_tells_of_a_server_that_does_not_stop_in_good_order(repository: Path, tmp_path: Path) -> None:
    """Triton never finishes the unloading of a model whose process died, and gives up after its exit timeout."""
    command = [Path(sys.executable).parent / "epd", "serve", "--repository", repository, "--config-name", ""]
    command += ["--log", tmp_path / "log", *(f"--{service}-port=0" for service in ("http", "grpc", "metrics"))]
    serving = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert serving.stdout is not None
        _, _, _, url, *_ = serving.stdout.readline().split()
        kill_stub(url)
        control.reload(url, "pid")
        serving.send_signal(signal.SIGTERM)
        output, _ = serving.communicate(timeout=60)
    finally:
        serving.kill()
    last = f"tritonserver did not stop in good order: it ended with exit status 1; log: {tmp_path / 'log'}"
    assert output.splitlines()[-1] == f"error: {last}"
    assert serving.returncode == 1


def test_the_reason_of_a_model_that_does_not_load_is_in_the_error(repository: Path) -> None:
    server = Server(repository, env={"REASON_TO_FAIL": "no checkpoint at /nowhere"})
    with pytest.raises(LaunchError, match=r"failed to load 'pid' version 1: .*no checkpoint at /nowhere.*log: "):
        server.start()
    server.log.unlink()


def test_a_model_that_is_not_there(repository: Path) -> None:
    server = Server(repository, models=["missing"])
    with pytest.raises(LaunchError, match="failed to poll model 'missing': model not found"):
        server.start()
    server.log.unlink()


def test_no_answer_within_the_limit(repository: Path) -> None:
    server = Server(repository, ready_timeout_s=0.0)
    with pytest.raises(LaunchError, match="not ready within 0 s"):
        server.start()
    server.log.unlink()


def test_serve_gives_up_on_models_that_do_not_load_in_time(repository: Path) -> None:
    command = [Path(sys.executable).parent / "epd", "serve", "--repository", repository, "--config-name", ""]
    command += ["--ready-timeout=0.1", *(f"--{service}-port=0" for service in ("http", "grpc", "metrics"))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    told = re.fullmatch(r"error: tritonserver was not ready within .* log: (\S+)\n", result.stderr)
    assert told, result.stderr
    assert not processes_that_name(str(repository))
    Path(told[1]).unlink()


def test_an_interrupted_start_leaves_nothing(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(repository)

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "_wait_ready", interrupt)
    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert not server.log.exists()
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if str(server.log) in os.path.realpath(fd)]


def test_a_port_in_use_is_named(repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} on 127.0.0.1: Address already in use; stop what uses it"):
            Server(repository, grpc_port=port).start()


def test_a_missing_repository_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"no model repository at .*/missing"):
        Server(tmp_path / "missing").start()


def test_a_missing_tritonserver_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "pytriton", None)
    with pytest.raises(install.InstallError, match=r"none on PATH.*pip install 'triton-epd\[triton\]'.*container"):
        install.find_tritonserver()


def test_tritonserver_on_path_comes_first_and_keeps_its_own_backends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable = tmp_path / "tritonserver"
    executable.write_text("#!/bin/sh\n")
    executable.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = install.find_tritonserver()
    assert found == install.Installation(executable, wheel=None)
    assert found.environment({"PATH": "/usr/bin"})["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert "LD_LIBRARY_PATH" not in found.environment({})


def test_a_python_without_shared_library_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.sysconfig, "get_config_var", lambda _name: str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    with pytest.raises(install.InstallError, match=r"libpython3\.\d+\.so\.1\.0 not found.*apt-get install libpython3"):
        install.find_libpython()


def test_a_python_version_without_stub_is_explained(tmp_path: Path) -> None:
    stubs = tmp_path / "pytriton" / "tritonserver" / "python_backend_stubs"
    (stubs / "3.8").mkdir(parents=True)
    with pytest.raises(install.InstallError, match=r"no stub for Python 3\.\d+, only for 3\.8"):
        install.assemble_backend(tmp_path, tmp_path / "out")


def test_how_a_server_ended_is_said() -> None:
    assert [describe_exit(status) for status in (1, -signal.SIGSEGV)] == ["with exit status 1", "by SIGSEGV"]


def test_explain_prefers_the_model_over_what_follows_from_it() -> None:
    log = (
        'E1129 15:00:00.1 1 cuda.cc:1] "CudaDriverHelper has not been initialized."\n'
        "E1129 15:00:01.1 1 model.cc:1] \"failed to load 'decode' version 1: Internal: no such file\"\n"
        "error: creating server: Internal - failed to load all models\n"
    )
    assert explain(log) == "failed to load 'decode' version 1: Internal: no such file"
    assert explain("error: creating server: bad flag\n") == "creating server: bad flag"
    assert explain("") == "its log gives no reason"


def test_models_that_are_still_loading_are_named() -> None:
    log = '"loading: encoder:1"\n"loading: decode:1"\n"successfully loaded \'decode\'"\n'
    assert still_loading(log) == ["encoder"]


def test_stale_shared_memory_is_told_from_memory_in_use() -> None:
    used, stale = (f"{shm.TRITON_PREFIX}test-{os.getpid()}-{name}" for name in ("used", "stale"))
    for name in (used, stale):
        (shm.DIRECTORY / name).write_bytes(b"\0" * 4096)
    mapped = np.memmap(shm.DIRECTORY / used, np.uint8, "r+")
    try:
        assert {used, stale} <= shm.names()
        assert shm.remove_stale([used, stale]) == [stale]
        assert not (shm.DIRECTORY / stale).exists()
    finally:
        del mapped
        assert shm.remove_stale([used]) == [used]
