"""Start a real Triton server, wait until it is ready, and stop it without leaving anything behind.

    with Server("model_repository", config_name="cpu") as server:
        Client(server.grpc)

The standard library alone is used, so that tests, benchmarks and the command line can all start from here.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from epd_client import install, shm
from epd_client.scratch import ScratchDirectory

READY_TIMEOUT_S = 600.0  # how long all models may take to load
EXIT_TIMEOUT_S = 10  # how long the server lets requests in flight finish when it is told to stop
KILL_TIMEOUT_S = 5  # how long killed stubs may take to end
READY_POLL_S = 0.1

# Becomes the server. The kernel then tells it to stop when the thread that started it ends, however that happens.
PR_SET_PDEATHSIG = 1
EXEC_TIED_TO_PARENT = f"""
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, int(signal.SIGTERM))
if os.getppid() != int(sys.argv[1]):
    sys.exit("the launcher is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class LaunchError(RuntimeError):
    """The server did not start; the message names the cause."""


class Server:
    """A `tritonserver` process on `repository`; a context manager, or `start()` and `stop()`.

    The server ends with the thread that starts it, even if that is killed.

    Ports that are not given are free ones. `env` is added to this process's environment. `models` are loaded (all by
    default) under explicit model control, so that a model whose process died can be unloaded and loaded again.
    Without `log`, the server's output goes to a temporary file, which is removed only after an orderly stop.
    """

    def __init__(
        self,
        repository: str | Path,
        *,
        config_name: str | None = None,
        models: Sequence[str] = ("*",),
        env: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        http_port: int | None = None,
        grpc_port: int | None = None,
        metrics_port: int | None = None,
        log: str | Path | None = None,
        ready_timeout_s: float = READY_TIMEOUT_S,
        extra_args: Sequence[str] = (),
    ) -> None:
        self.repository = Path(repository).resolve()
        self.config_name = config_name
        self.models = tuple(models)
        self.env = dict(env or {})
        self.host = host
        self.ready_timeout_s = ready_timeout_s
        self.extra_args = tuple(extra_args)
        self._asked_ports = (http_port, grpc_port, metrics_port)
        self._asked_log = Path(log) if log else None
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: ScratchDirectory | None = None
        self._shm_before: frozenset[str] = frozenset()

    http: str  # "host:port"
    grpc: str
    metrics: str
    log: Path

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    def running(self) -> bool:
        """Whether the process exists."""
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start, and wait until all models are ready. Raises LaunchError, InstallError."""
        if not self.repository.is_dir():
            raise LaunchError(f"no model repository at {self.repository}")
        installation = install.find_tritonserver()
        environment = installation.environment({**os.environ, **self.env})
        ports = _choose_ports(self.host, self._asked_ports)
        self.http, self.grpc, self.metrics = (f"{self.host}:{port}" for port in ports)
        self._directory = ScratchDirectory()
        self.log = self._asked_log or _make_log()
        self._shm_before = shm.names()
        try:
            command = [sys.executable, "-c", EXEC_TIED_TO_PARENT, str(os.getpid())]
            command += self._command(installation, ports)
            with self.log.open("wb") as log:
                # A session of its own: Ctrl-C in a terminal reaches the launcher alone, which then stops the server,
                # and the process group holds exactly the server and its stubs.
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
                )
            self._wait_ready()
        except BaseException as error:
            self._end(failed=True)
            if isinstance(error, KeyboardInterrupt) and self._asked_log is None:
                self.log.unlink(missing_ok=True)  # nobody needs to be told why
            raise

    def stop(self) -> int | None:
        """Let requests in flight finish, end the server, remove what it left behind. Returns its exit status.

        The status is negative, -N, if signal N ended the server, and None if there was none.

        A server that lost a model's process cannot unload that model and needs all of `EXIT_TIMEOUT_S`.
        """
        return self._end(failed=False)

    def _command(self, installation: install.Installation, ports: Sequence[int]) -> list[str]:
        assert self._directory is not None
        http_port, grpc_port, metrics_port = map(str, ports)
        command = [str(installation.executable), f"--model-repository={self.repository}"]
        if installation.wheel is not None:
            backends = install.assemble_backend(installation.wheel, self._directory.path / "backends")
            command.append(f"--backend-directory={backends}")
        if self.config_name:
            command.append(f"--model-config-name={self.config_name}")
        command += ["--model-control-mode=explicit", *(f"--load-model={name}" for name in self.models)]
        command += [
            "--disable-auto-complete-config",  # each stub would be started twice
            "--backend-config=python,thread-pool-size=256",  # a blocked call must not delay another client's token
            f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
            *(f"--{service}-address={self.host}" for service in ("http", "grpc", "metrics")),
            *(f"--http-port={http_port}", f"--grpc-port={grpc_port}", f"--metrics-port={metrics_port}"),
        ]
        return command + list(self.extra_args)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self.ready_timeout_s
        while time.monotonic() < deadline:
            if not self.running():
                raise LaunchError(f"tritonserver stopped while it started: {self._reason()}; log: {self.log}")
            # Of its services Triton starts that of the metrics last.
            if _answers(f"http://{self.http}/v2/health/ready") and _answers(f"http://{self.metrics}/metrics"):
                return
            time.sleep(READY_POLL_S)
        waiting = still_loading(self.log.read_text(errors="replace"))
        raise LaunchError(
            f"tritonserver was not ready within {self.ready_timeout_s:.0f} s; "
            f"still loading: {', '.join(waiting) or 'nothing'}; log: {self.log}"
        )

    def _reason(self) -> str:
        return explain(self.log.read_text(errors="replace"))

    def _end(self, *, failed: bool) -> int | None:
        status = None
        if self._process is not None:
            failed = failed or not self.running()  # it should have run until now
            status = _terminate(self._process, EXIT_TIMEOUT_S + 10)
            self._process = None
            shm.remove_stale(shm.names() - self._shm_before)
            if self._asked_log is None and not failed and status == 0:
                self.log.unlink(missing_ok=True)
        if self._directory is not None:
            self._directory.remove()
            self._directory = None
        return status


def explain(log: str) -> str:
    """What a server's log says best of why it did not start."""
    patterns = (
        r"(failed to load '.*)",  # a model: name, version and the exception's text
        r"tritonserver: (unrecognized option .*)",
        r"(?m)^E\d{4} .*\] (?!\"CudaDriverHelper)(.*)",
        r"(?m)^error: (.*)",
    )
    for pattern in patterns:
        if found := re.search(pattern, log):
            return found.group(1).replace("\\n", " ").strip(' "')
    return "its log gives no reason"


def still_loading(log: str) -> list[str]:
    """Names of the models that the server began to load and has not loaded."""
    loaded = set(re.findall(r"successfully loaded '(.*?)'", log))
    return [name for name in re.findall(r'"loading: (.*):\d+"', log) if name not in loaded]


def describe_exit(status: int | None) -> str:
    """How a process ended, by its exit status as `Server.stop` has it."""
    return f"by {signal.Signals(-status).name}" if status and status < 0 else f"with exit status {status}"


def _make_log() -> Path:
    fd, name = tempfile.mkstemp(prefix="epd-server-", suffix=".log")
    os.close(fd)
    return Path(name)


def _choose_ports(host: str, asked: Sequence[int | None]) -> list[int]:
    """The ports asked for, and free ones where none is asked for. Raises LaunchError for one that is taken."""
    sockets = []
    try:
        for port in asked:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sockets.append(listener)
            try:
                listener.bind((host, port or 0))
            except OSError as error:
                reason = f"port {port} on {host}: {error.strerror}; stop what uses it or choose another"
                raise LaunchError(reason) from error
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _terminate(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    """SIGTERM, a bounded wait, then SIGKILL; stubs that outlive their server are killed."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
    status = process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while _group_runs(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return status


def _group_runs(group: int) -> bool:
    """Whether the process group has a member that is not a zombie, or is one with threads that have yet to end.

    These keep files open, and with them the locks that tell arenas in use from stale ones.
    """
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            state, _parent, its_group = (path / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and (state not in "ZX" or len(list((path / "task").iterdir())) > 1):
                return True
    return False
