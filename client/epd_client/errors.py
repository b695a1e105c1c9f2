"""What a failed request raises: Triton's error, and the remedy where its words name none."""

from __future__ import annotations

import re

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


def as_epd_error(error: InferenceServerException, url: str) -> EpdError:
    """What tritonclient raised, with the remedy where the server is gone or stops, or a model or its process is gone.

    Much of this is told by Triton's texts alone. An error in a stream has no status but the one that its text begins
    with (it would have one if asked for by `triton_grpc_error`, but such errors crash Triton 2.51 now and then), and a
    model whose process has died goes on being ready.
    """
    code = str(error.status() or "INTERNAL").removeprefix("StatusCode.")
    message = error.message()
    if stated := re.match(r"\[([A-Z_]+)\] ", message):
        code, message = stated[1], message[stated.end() :]
    if code == "UNAVAILABLE" and "connect" in message.lower():
        remedy = "start one with `epd serve`, or name one elsewhere with `--url HOST:PORT`"
        message = f"no server answers at {url} ({message}); {remedy}"
    if code == "CANCELLED" and "Locally" not in message:  # not by this client: gRPC says "Locally cancelled" then
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
