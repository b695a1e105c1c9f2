"""What a failed request raises: Triton's error, and the remedy where its words name none."""

from __future__ import annotations

import re

import grpc
from tritonclient.utils import InferenceServerException


class EpdError(RuntimeError):
    """A request failed.

    `code` is the gRPC status ("INVALID_ARGUMENT", "UNAVAILABLE", "DEADLINE_EXCEEDED", ...); `died` the called model, if
    its process is gone.
    """

    def __init__(self, message: str, code: str, *, died: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.died = died


def as_epd_error(error: InferenceServerException | grpc.RpcError, url: str) -> EpdError:
    """What tritonclient or gRPC raised, with the remedy where a server, a model or its process is gone.

    Much of this is told by Triton's texts alone. An error in a stream has no status but the one that its text begins
    with (it would have one if asked for by `triton_grpc_error`, but such errors crash Triton 2.51 now and then), and a
    model whose process has died goes on being ready.
    """
    if isinstance(error, grpc.RpcError):
        status, message = error.code(), error.details() or ""
    else:
        status, message = error.status(), error.message()
    code = str(status or "INTERNAL").removeprefix("StatusCode.")
    if stated := re.match(r"\[([A-Z_]+)\] ", message):
        code, message = stated[1], message[stated.end() :]
    if code == "UNAVAILABLE" and re.search("connect|resolv", message.lower()):
        remedy = "start one with `epd serve`, or name one elsewhere with `--url HOST:PORT`"
        message = f"no server answers at {url} ({message}); {remedy}"
    if code == "DEADLINE_EXCEEDED":
        message = f"no complete answer within the time limit ({message})"
    if code == "CANCELLED" and not re.search("Locally cancelled|Channel closed", message):  # not by this client
        code = "UNAVAILABLE"
        message = f"the server has ended the call, as it does when it stops ({message}); send the request again later"
    if re.search("Server not ready|Server is stopping|Server exiting", message):
        code = "UNAVAILABLE"
        message = f"the server is stopping ({message}); send the request again later"
    if unloaded := re.search(r"'(.+)' has no available versions", message):
        code = "UNAVAILABLE"
        message = (
            f"model '{unloaded[1]}' is not loaded ({message}); if the server is stopping or the model is being loaded, "
            f"send the request again later, else run `epd reload {unloaded[1]}`"
        )
    if died := re.search(r"Stub process '(.+)_\d+_\d+' is not healthy", message):
        message = f"the process of model '{died[1]}' has died ({message}); start it again with `epd reload {died[1]}`"
        return EpdError(message, code, died=died[1])
    return EpdError(message, code)
