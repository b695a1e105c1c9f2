"""From what Triton tells a model instance to its worker: device, roles, configuration file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast, get_args

from epd_scheduler import config
from epd_scheduler.config import config_path
from epd_scheduler.profile import load_profile
from epd_scheduler.protocol import Role

from epd_backend.emulated import EmulatedWorker

if TYPE_CHECKING:
    from epd_backend.worker import Worker


# Turns for which threads of an instance with cores of its own wait awake for their part of the next product, some 0.25
# to 1 ms. To be woken for each takes as long as a small product; where others share the cores, it is the lesser evil.
_SPINS = "10000"

# oneDNN makes code for each shape of a product, and so for each number of rows: half a millisecond, a megabyte or two.
# Both torch and oneDNN itself keep that of 1,024 shapes by default; that of 128 takes a quarter of a gigabyte.
_ONEDNN_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
_KEPT = "128"


def open_worker(args: Mapping[str, str]) -> Worker | EmulatedWorker:
    """The worker of a Triton model instance; `args` is what the Python backend passes to `initialize`.

    Of the model's parameters, `roles` is required; `device` names a virtual CPU device for KIND_CPU (default "cpu:0"),
    while for KIND_GPU the instance group does; `threads` is the parallelism of each stage; `cpus` ("0,2") are the
    host's cores, taken to be its own (default: all, shared); `emulate` names a profile whose costs stand in for
    computing.
    All instances of a server are children of one process and share arenas by its id.

    Raises ConfigError and what `Worker` raises.
    """
    parameters = {
        key: str(value["string_value"]) for key, value in json.loads(args["model_config"])["parameters"].items()
    }
    device = parameters.get("device", "cpu:0")
    if args["model_instance_kind"] == "GPU":
        device = f"cuda:{args['model_instance_device_id']}"
    if cpus := parameters.get("cpus"):
        _stay_on(cpus)
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    settings = config.load(config_path(args["model_repository"]))
    name, roles = args["model_name"], _roles(parameters.get("roles", ""))
    stages = int(parameters.get("stages", "1"))
    if path := parameters.get("emulate"):
        return EmulatedWorker(settings, load_profile(path), name=name, roles=roles, device=device, stages=stages)
    for cache in _ONEDNN_CACHES:
        os.environ.setdefault(cache, _KEPT)
    import torch  # not before the environment is complete; an emulated worker does without

    # Of this thread, for importing too: with more threads in all than cores, OpenMP lets none wait awake.
    torch.set_num_threads(1)
    from epd_backend import cpu
    from epd_backend.worker import Worker

    cpu.keep_memory()
    return Worker(
        settings,
        name=name,
        roles=roles,
        device=device,
        stages=stages,
        threads=int(parameters.get("threads", "1")),
        namespace=str(os.getppid()),
    )


def _stay_on(cpus: str) -> None:
    """Bind this thread, and so all that it will start, to the cores of a `cpus` parameter. Raises ConfigError."""
    try:
        os.sched_setaffinity(0, {int(core) for core in cpus.split(",")})
    except (ValueError, OSError) as error:
        raise config.ConfigError(
            f"parameter 'cpus' of the model is {cpus!r} ({error}); name cores that this process may use, like 0,2"
        ) from error


def _roles(text: str) -> tuple[Role, ...]:
    roles = tuple(part.strip() for part in text.split(",") if part.strip())
    if not roles or not set(roles) <= set(get_args(Role)):
        raise config.ConfigError(
            f"parameter 'roles' of the model is {text!r}; name one or several of {', '.join(get_args(Role))}"
        )
    return cast("tuple[Role, ...]", roles)
