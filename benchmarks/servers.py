"""Real servers for measurements, each on a repository of its own, its instances bound to cores or emulated."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from epd_client.configure import parse_topology, write_repository
from epd_client.launch import Server

ROOT = Path(__file__).resolve().parents[1]
_CONFIG = """
model: {model}
dtype: {dtype}
kv: {{blocks: {kv}}}
embedding: {{blocks: {embedding}}}
scheduler: {{{scheduler}}}
limits: {{context: 8192}}
"""


def configuration(model: Path, dtype: str, scheduler: str, *, kv: int = 512, embedding: int = 512) -> str:
    """As deploy/epd.yaml; `scheduler` is YAML, `kv` and `embedding` are blocks of 16."""
    return _CONFIG.format(model=model, dtype=dtype, scheduler=scheduler, kv=kv, embedding=embedding)


@contextlib.contextmanager
def serve(
    config: str, topology: str, *, cores: Mapping[str, str] | None = None, threads: int = 1, emulate: Path | None = None
) -> Iterator[Server]:
    """A server; `cores` by instance, `threads` of each, `emulate` is a profile whose costs stand in for computing."""
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as directory:
        repository = Path(directory) / "models"
        write_repository(ROOT / "model_repository", repository, parse_topology(topology), threads, emulate)
        for name, core in (cores or {}).items():
            with (repository / name / "config.pbtxt").open("a") as file:
                file.write(f'parameters: {{ key: "cpus" value: {{ string_value: "{core}" }} }}\n')
        path = Path(directory) / "epd.yaml"
        path.write_text(config)
        with Server(repository, env={"EPD_CONFIG": str(path), "OMP_WAIT_POLICY": "passive"}) as running:
            yield running


@contextlib.contextmanager
def ahead() -> Iterator[None]:
    """Real-time priority for this thread and those that it starts, where the system allows it.

    For a load generator that shares a core with workers: it stands for clients on other machines, which nobody holds
    up, and needs little. As an ordinary process it was seen to wait half a second for its core.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
