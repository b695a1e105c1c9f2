"""Write a model repository for a topology: which instances there are, what each does, and on which device."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

NAMES = {"E": "encoder", "P": "prefill", "D": "decode", "EP": "encoder_prefill", "PD": "language", "EPD": "aggregated"}
ROLES = {"E": "encode", "P": "prefill", "D": "decode"}
_TOPOLOGY = re.compile(r"(\d+)(EPD|EP|PD|E|P|D)", re.IGNORECASE)


class TopologyError(ValueError):
    """The topology cannot be made; the message says why."""


class Placement(msgspec.Struct, frozen=True):
    """One worker instance, a Triton model of its own."""

    name: str
    roles: tuple[str, ...]
    device: str  # "cpu:N" (virtual: arenas of its own) or "cuda:N"
    stages: int = 1


def parse_topology(text: str, devices: Sequence[str] = (), stages: int = 1) -> list[Placement]:
    """ "2E1P2D", "1E1PD", "1EPD"...: instances in that order; letters together are one instance that does all of them.

    `devices` names one device an instance; without it the n-th instance gets cpu:n. `stages` are the pipeline stages
    of each language instance. Raises TopologyError.
    """
    parts = _TOPOLOGY.findall(text)
    if not parts or "".join(count + kind for count, kind in parts) != text:
        raise TopologyError(f"topology '{text}' is not like 2E1P2D, 1E1PD or 1EPD")
    names: list[tuple[str, str]] = []
    for count, kind in parts:
        base, before = NAMES[kind.upper()], sum(name.startswith(NAMES[kind.upper()]) for _, name in names)
        for index in range(before, before + int(count)):
            names.append((kind.upper(), base if index == 0 else f"{base}_{index}"))
    served = {letter for kind, _ in names for letter in kind}
    if missing := set(ROLES) - served:
        raise TopologyError(f"topology '{text}' has no instance for {', '.join(sorted(missing))}")
    if devices and len(devices) != len(names):
        raise TopologyError(f"topology '{text}' has {len(names)} instances, but {len(devices)} devices are named")
    for device in devices:
        if not re.fullmatch(r"(cpu|cuda):\d+", device):
            raise TopologyError(f"device '{device}' is not like cpu:0 or cuda:1")
    chosen = devices or [f"cpu:{index}" for index in range(len(names))]
    return [
        Placement(name, tuple(ROLES[letter] for letter in kind), device, stages if kind != "E" else 1)
        for (kind, name), device in zip(names, chosen, strict=True)
    ]


def write_repository(
    source: Path, target: Path, placements: Sequence[Placement], threads: int = 1, emulate: Path | None = None
) -> None:
    """Write the models `placements` and the orchestrator that knows them to `target`.

    The code is linked from the repository `source`, so it is never a copy that ages. `emulate`: a profile whose costs
    stand in for computing. Raises TopologyError if `target` holds something else already or `source` is no such
    repository.
    """
    if not (source / "epd_ensemble" / "config.pbtxt").is_file():
        raise TopologyError(
            f"{source.resolve()} has no model 'epd_ensemble'; name the project's model_repository with --source"
        )
    if target.exists() and any(target.iterdir()):
        raise TopologyError(f"{target} is not empty; name a new directory")
    for placement in placements:
        link_code(source / "encoder", target / placement.name)
        (target / placement.name / "config.pbtxt").write_text(worker_config(placement, threads, emulate))
    link_code(source / "epd_ensemble", target / "epd_ensemble")
    orchestrator = (source / "epd_ensemble" / "config.pbtxt").read_text()
    names = ",".join(placement.name for placement in placements)
    (target / "epd_ensemble" / "config.pbtxt").write_text(orchestrator.replace("encoder,prefill,decode", names))


def link_code(model: Path, target: Path) -> None:
    """Make the directory of a model whose version 1 is that of `model`."""
    target.mkdir(parents=True)
    (target / "1").symlink_to(os.path.relpath((model / "1").resolve(), target.resolve()))


def worker_config(placement: Placement, threads: int = 1, emulate: Path | None = None) -> str:
    """config.pbtxt of one worker instance."""
    kind, index = placement.device.split(":")
    group = f"kind: KIND_GPU count: 1 gpus: [ {index} ]" if kind == "cuda" else "kind: KIND_CPU count: 1"
    parameters = {"roles": ",".join(placement.roles), "stages": placement.stages, "threads": threads}
    if kind == "cpu":
        parameters["device"] = placement.device
    if emulate:
        parameters["emulate"] = str(emulate.resolve())
    lines = [
        f'parameters: {{ key: "{key}" value: {{ string_value: "{value}" }} }}' for key, value in parameters.items()
    ]
    return "\n".join((_WORKER.format(name=placement.name, group=group), *lines, ""))


_WORKER = """name: "{name}"
backend: "python"
max_batch_size: 0

input [
  {{ name: "PLANS" data_type: TYPE_UINT8 dims: [ -1 ] }},
  {{ name: "MEDIA" data_type: TYPE_UINT8 dims: [ -1 ] optional: true }}
]
output [
  {{ name: "OUTCOMES" data_type: TYPE_UINT8 dims: [ -1 ] }}
]

instance_group [{{ {group} }}]
"""
