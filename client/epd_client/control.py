"""Health of a running server, and how to bring back a model whose process died."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tritonclient.grpc as triton
from PIL import Image
from tritonclient.utils import InferenceServerException

from epd_client.client import Client, EpdError, as_epd_error

RELOAD_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Check:
    """One line of a health report."""

    name: str
    ok: bool
    detail: str


def health(url: str, timeout_s: float = 30.0) -> list[Check]:
    """The server, each model, and a tiny request with an image that runs through every stage.

    The request is the real proof: Triton calls a model ready even when its process is gone.
    """
    checks = []
    with triton.InferenceServerClient(url) as server:
        try:
            ready = server.is_server_ready(client_timeout=timeout_s)
            index = server.get_model_repository_index(client_timeout=timeout_s, as_json=True)
            names = [model["name"] for model in index.get("models", []) if model.get("state") == "READY"]
            emulated = {name for name in names if _emulated(server, name, timeout_s)}
        except InferenceServerException as error:
            return [Check("server", False, str(as_epd_error(error, url)))]
    checks.append(Check("server", ready, f"{url} " + ("is ready" if ready else "is not ready")))
    for model in index.get("models", []):
        state = model.get("state", "not loaded")
        detail = model.get("reason") or state.lower()
        if model["name"] in emulated:
            detail += ", EMULATED: it waits for a cost model's time instead of computing"
        checks.append(Check(f"model {model['name']}", state == "READY", detail))
    checks.append(_probe(url, timeout_s))
    return checks


def reload(url: str, model: str) -> float:
    """Unload and load `model`, which starts its process again. Returns the seconds it took. Raises EpdError.

    Loading alone does nothing for a model that Triton believes to be there.
    """
    begin = time.monotonic()
    with triton.InferenceServerClient(url) as server:
        try:
            server.unload_model(model, client_timeout=RELOAD_TIMEOUT_S)
            server.load_model(model, client_timeout=RELOAD_TIMEOUT_S)
        except InferenceServerException as error:
            raise as_epd_error(error, url) from error
    return time.monotonic() - begin


def encodes_apart(url: str, timeout_s: float = 30.0) -> bool:
    """True if encoders and prefill instances share no device, by their models' configurations. Raises EpdError."""
    devices: dict[str, set[str]] = {"encode": set(), "prefill": set()}
    with triton.InferenceServerClient(url) as server:
        try:
            index = server.get_model_repository_index(client_timeout=timeout_s, as_json=True)
            for model in index.get("models", []):
                if model.get("state") == "READY":
                    config = server.get_model_config(model["name"], client_timeout=timeout_s, as_json=True)["config"]
                    roles = config.get("parameters", {}).get("roles", {}).get("string_value", "")
                    for role in devices.keys() & {part.strip() for part in roles.split(",")}:
                        devices[role].add(_device(config))
        except InferenceServerException as error:
            raise as_epd_error(error, url) from error
    return devices["encode"].isdisjoint(devices["prefill"])


def _device(config: Mapping[str, Any]) -> str:
    """Device of a worker model."""
    (group,) = config["instance_group"]
    if gpus := group.get("gpus"):
        return f"cuda:{gpus[0]}"
    return str(config["parameters"].get("device", {}).get("string_value", "cpu:0"))


def _emulated(server: triton.InferenceServerClient, model: str, timeout_s: float) -> bool:
    config = server.get_model_config(model, client_timeout=timeout_s, as_json=True)["config"]
    return "emulate" in config.get("parameters", {})


def _probe(url: str, timeout_s: float) -> Check:
    name = "request"
    image = Image.frombytes("RGB", (8, 8), os.urandom(192)).resize((56, 56))  # never seen: not from a cache
    try:
        with Client(url, timeout_s=timeout_s) as client:
            answer = client.ask("?", images=[image], sampling={"max_tokens": 2, "ignore_eos": True}, timeline=True)
    except EpdError as error:
        return Check(name, False, str(error))
    spans = answer.timeline.spans if answer.timeline else ()
    stages = dict.fromkeys(f"{span.name} on {span.instance}" for span in spans if span.instance)
    return Check(name, True, f"{', '.join(stages)}: {answer.total_s * 1e3:.0f} ms")
