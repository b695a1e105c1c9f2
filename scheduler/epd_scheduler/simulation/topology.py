"""Instances of a simulated deployment."""

from __future__ import annotations

import re

import msgspec

from epd_scheduler.config import Config
from epd_scheduler.protocol import ArenaInfo, Role, WorkerInfo

_ROLES: dict[str, Role] = {"E": "encode", "P": "prefill", "D": "decode"}


class TopologyError(ValueError):
    """The instances cannot serve; the message says what is wrong."""


class InstanceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`count` equal instances. `[encode, prefill, decode]` on one instance is the monolithic baseline."""

    roles: tuple[Role, ...]
    count: int = 1
    stages: int = 1  # pipeline stages, a device each
    device: str = ""  # instances that name the same device share it and its arenas; empty: one of its own
    profile: str = ""  # of a tensor parallel instance, or of another kind of device; empty: the scenario's


def topology(text: str, *, stages: int = 1) -> tuple[InstanceSpec, ...]:
    """Instances from the papers' notation: `5E1P2D`, `1E1PD` (prefill and decode on one instance), `8EPD`.

    `stages` is of the instances that hold the language model. Raises TopologyError.
    """
    if not re.fullmatch(r"(\d+(?:EPD|EP|PD|E|P|D))+", text):
        raise TopologyError(f"'{text}' is no topology; write e.g. 5E1P2D, 1E1PD or 8EPD")
    specs = []
    for count, letters in re.findall(r"(\d+)([EPD]+)", text):
        roles = tuple(_ROLES[letter] for letter in letters)
        specs.append(InstanceSpec(roles=roles, count=int(count), stages=1 if letters == "E" else stages))
    return tuple(specs)


def worker_infos(specs: tuple[InstanceSpec, ...], config: Config) -> list[tuple[WorkerInfo, InstanceSpec]]:
    """What each instance says of itself when it joins, beside its spec. Raises TopologyError."""
    missing = {"encode", "prefill", "decode"} - {role for spec in specs if spec.count > 0 for role in spec.roles}
    if missing:
        raise TopologyError(f"no instance for {', '.join(sorted(missing))}; give one the role")
    made: list[tuple[WorkerInfo, InstanceSpec]] = []
    for spec in specs:
        for _ in range(spec.count):
            letters = "".join(letter for letter, role in _ROLES.items() if role in spec.roles)
            name = f"{letters}{sum(info.name.rstrip('0123456789') == letters for info, _ in made)}"
            device = spec.device or name
            language = "prefill" in spec.roles or "decode" in spec.roles
            info = WorkerInfo(
                name=name,
                roles=spec.roles,
                device=device,
                stages=spec.stages,
                kv=(_kv_arena(device, config),) if language else (),
                embedding=_embedding_arena(device, config) if "prefill" in spec.roles else None,
            )
            made.append((info, spec))
    return made


def _kv_arena(device: str, config: Config) -> ArenaInfo:
    return ArenaInfo(f"kv@{device}", "kv", device, "", (config.kv.blocks, 1, 2, config.kv.block_size, 1, 1), "")


def _embedding_arena(device: str, config: Config) -> ArenaInfo:
    shape = (config.embedding.blocks, config.embedding.block_size, 1)
    return ArenaInfo(f"embedding@{device}", "embedding", device, "", shape, "")
