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

from epd_client.client import MODEL, Answer, Client
from epd_client.errors import EpdError, as_epd_error
from epd_client.launch import READY_TIMEOUT_S

RELOAD_TIMEOUT_S = 120.0  # for Triton to unload, which waits for open requests, and to answer
TAKE_UP_S = 30.0  # for the orchestrator to find a loaded model; it looks once a second
# The longest that a request of ours may keep us from looking again, and that `health` waits for a worker to be called;
# a dead process is told after 1 s.
LOOK_S = 3.0
POLL_S = 0.1


@dataclass(frozen=True)
class Check:
    """One line of a health report."""

    name: str
    ok: bool
    detail: str


def health(url: str, timeout_s: float = 30.0) -> list[Check]:
    """The server, each model, and a tiny request with an image that runs through every stage.

    The request is the real proof: Triton calls a model ready even when its process is gone. So is a worker that takes
    no part told even if another does its work.
    """
    with triton.InferenceServerClient(url) as server:
        try:
            ready = server.is_server_ready(client_timeout=timeout_s)
            models = _models(server, timeout_s)
            names = [model["name"] for model in models if model.get("state") == "READY"]
            configs = {name: _config(server, name, timeout_s) for name in names}
            request, lost = _find_lost(server, url, [name for name in names if _roles(configs[name])], timeout_s)
        except InferenceServerException as error:
            return [Check("server", False, str(as_epd_error(error, url)))]
    checks = [Check("server", ready, f"{url} " + ("is ready" if ready else "is not ready"))]
    for model in models:
        name, state = model["name"], model.get("state", "not loaded")
        detail = model.get("reason") or state.lower()
        if "emulate" in configs.get(name, {}).get("parameters", {}):
            detail += ", EMULATED: it waits for a cost model's time instead of computing"
        if name in lost:
            detail = f"takes no part in requests; bring it back with `epd reload {name}`, or see the server's log"
        checks.append(Check(f"model {name}", state == "READY" and name not in lost, detail))
    return [*checks, request]


def _find_lost(
    server: triton.InferenceServerClient, url: str, workers: list[str], timeout_s: float
) -> tuple[Check, list[str]]:
    """The tiny request, repeated for as long as a worker has not been called; and those that were not.

    While a request is open the orchestrator calls every worker, lost ones once a second.
    """
    deadline = time.monotonic() + LOOK_S
    before = {name: _succeeded_calls(server, name) for name in workers}
    while True:
        request = _probe(url, timeout_s)
        if not request.ok and "no live instance" not in request.detail:
            return request, []  # nothing can be said of the workers
        lost = [name for name in workers if _succeeded_calls(server, name) == before[name]]
        if not lost or time.monotonic() > deadline:
            return request, lost
        time.sleep(POLL_S)


def reload(url: str, model: str, take_up_s: float = TAKE_UP_S) -> float:
    """Unload and load `model`, which starts its process again, and wait until it takes part in requests again.

    Loading alone does nothing for a model that Triton believes to be there. Open requests of a live orchestrator are
    finished first. A model that is neither a worker nor the orchestrator need only be loaded. Returns the seconds it
    all took. Raises EpdError, also if `take_up_s` after loading the orchestrator has not found the worker yet.
    """
    begin = time.monotonic()
    with triton.InferenceServerClient(url) as server:
        try:
            names = sorted(each["name"] for each in _models(server, RELOAD_TIMEOUT_S))
            if model not in names:
                raise EpdError(f"the server has no model '{model}'; it has: {', '.join(names)}", "NOT_FOUND")
            alive = model == MODEL and not _orchestrator_died(url)
            server.unload_model(model, client_timeout=RELOAD_TIMEOUT_S)
            if alive and not _is_unloaded(server, model, RELOAD_TIMEOUT_S):
                message = f"{model} is not unloaded after {RELOAD_TIMEOUT_S:.0f} s, for requests are still open"
                raise EpdError(f"{message}; run `epd reload {model}` again later, or restart the server", "UNAVAILABLE")
            server.load_model(model, client_timeout=READY_TIMEOUT_S)
            if model == MODEL or _roles(_config(server, model, RELOAD_TIMEOUT_S)):
                _wait_for_part(server, url, model, take_up_s)
        except InferenceServerException as error:
            raise as_epd_error(error, url) from error
    return time.monotonic() - begin


def _orchestrator_died(url: str) -> bool:
    """Whether its process is gone: Triton then ends neither the streams that were open nor the unloading."""
    try:
        _ask(url, LOOK_S)
    except EpdError as error:
        return error.died == MODEL
    return False


def drain(url: str, timeout_s: float) -> bool:
    """Let the server refuse new requests and finish the open ones; it then serves none until the orchestrator is
    loaded again.

    Returns whether all have ended within `timeout_s`. Raises EpdError.
    """
    with triton.InferenceServerClient(url) as server:
        try:
            server.unload_model(MODEL, client_timeout=timeout_s)
            return _is_unloaded(server, MODEL, timeout_s)
        except InferenceServerException as error:
            raise as_epd_error(error, url) from error


def unload_workers(url: str, timeout_s: float) -> None:
    """After `drain`, let the processes of all models end in order; give up after `timeout_s`. Raises EpdError.

    A server that is told to stop while HTTP connections are open, if only idle ones, spends all of its exit timeout on
    them and would have none left for its models. One whose process has died is never unloaded.
    """
    deadline = time.monotonic() + timeout_s
    with triton.InferenceServerClient(url) as server:
        try:
            names = [model["name"] for model in _models(server, timeout_s) if model.get("state") == "READY"]
            for name in names:
                server.unload_model(name, client_timeout=timeout_s)
            for name in names:
                _is_unloaded(server, name, deadline - time.monotonic())
        except InferenceServerException as error:
            raise as_epd_error(error, url) from error


def _is_unloaded(server: triton.InferenceServerClient, model: str, timeout_s: float) -> bool:
    """Wait for it: Triton unloads in the background, when the last open request has ended, and would load meanwhile.

    Two orchestrators would give the same memory of workers to different requests, and share metrics, which crashes
    Triton 2.51.
    """
    deadline = time.monotonic() + timeout_s
    while _state(server, model) == "UNLOADING":
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _state(server: triton.InferenceServerClient, model: str) -> str:
    return next((each.get("state", "") for each in _models(server, RELOAD_TIMEOUT_S) if each["name"] == model), "")


def _wait_for_part(server: triton.InferenceServerClient, url: str, model: str, timeout_s: float) -> None:
    """Wait until the orchestrator has called a worker's new process, or the new orchestrator has answered a request.

    The orchestrator calls workers only while a request is open, hence requests of our own. Their answers prove nothing
    of a worker: another instance may serve them, or another lost one be missing.
    """
    deadline = time.monotonic() + timeout_s
    problem = "no request was answered"
    while (left := deadline - time.monotonic()) > 0:
        if model != MODEL and _succeeded_calls(server, model):
            return
        try:
            _ask(url, left if model == MODEL else LOOK_S)
        except EpdError as error:
            problem = str(error)
            if model == MODEL and "no live instance" in problem:
                return  # it answers; which worker is lost, `epd health` tells
        else:
            if model == MODEL:
                return
        time.sleep(POLL_S)
    raise EpdError(
        f"{model} is loaded again, but takes no part in requests after {timeout_s:.0f} s: {problem}; "
        "see what else is wrong with `epd health`, and the server's log",
        "UNAVAILABLE",
    )


def _succeeded_calls(server: triton.InferenceServerClient, model: str) -> int:
    """Calls that succeeded since the model was loaded."""
    statistics = server.get_inference_statistics(model, client_timeout=RELOAD_TIMEOUT_S, as_json=True)
    return sum(int(each["inference_stats"]["success"].get("count", 0)) for each in statistics["model_stats"])


def encodes_apart(url: str, timeout_s: float = 30.0) -> bool:
    """True if encoders and prefill instances share no device, by their models' configurations. Raises EpdError."""
    devices: dict[str, set[str]] = {"encode": set(), "prefill": set()}
    with triton.InferenceServerClient(url) as server:
        try:
            for model in _models(server, timeout_s):
                if model.get("state") == "READY":
                    config = _config(server, model["name"], timeout_s)
                    for role in devices.keys() & _roles(config):
                        devices[role].add(_device(config))
        except InferenceServerException as error:
            raise as_epd_error(error, url) from error
    return devices["encode"].isdisjoint(devices["prefill"])


def _roles(config: Mapping[str, Any]) -> set[str]:
    """Stages that a worker model serves; none if it is no worker."""
    roles = config.get("parameters", {}).get("roles", {}).get("string_value", "")
    return {part.strip() for part in roles.split(",")} - {""}


def _device(config: Mapping[str, Any]) -> str:
    """Device of a worker model."""
    (group,) = config["instance_group"]
    if gpus := group.get("gpus"):
        return f"cuda:{gpus[0]}"
    return str(config["parameters"].get("device", {}).get("string_value", "cpu:0"))


def _models(server: triton.InferenceServerClient, timeout_s: float) -> list[dict[str, str]]:
    """The repository's models: `name`, and `state` and `reason` where Triton has any."""
    index = server.get_model_repository_index(client_timeout=timeout_s, as_json=True)
    return list(index.get("models", []))


def _config(server: triton.InferenceServerClient, model: str, timeout_s: float) -> dict[str, Any]:
    """Configuration of a loaded model."""
    return dict(server.get_model_config(model, client_timeout=timeout_s, as_json=True)["config"])


def _probe(url: str, timeout_s: float) -> Check:
    name = "request"
    try:
        answer = _ask(url, timeout_s)
    except EpdError as error:
        return Check(name, False, str(error))
    spans = answer.timeline.spans if answer.timeline else ()
    stages = dict.fromkeys(f"{span.name} on {span.instance}" for span in spans if span.instance)
    return Check(name, True, f"{', '.join(stages)}: {answer.total_s * 1e3:.0f} ms")


def _ask(url: str, timeout_s: float) -> Answer:
    """A tiny request that runs through every stage. Raises EpdError."""
    image = Image.frombytes("RGB", (8, 8), os.urandom(192)).resize((56, 56))  # never seen: not from a cache
    with Client(url, timeout_s=timeout_s) as client:
        return client.ask("?", images=[image], sampling={"max_tokens": 2, "ignore_eos": True}, timeline=True)
