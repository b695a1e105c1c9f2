"""One request's gRPC stream. However its reader leaves, the request ends on the server and no thread stays."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import Any

import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from epd_client.errors import as_epd_error

_MARGIN_S = 10.0  # a stream that nobody closes ends so long after its request's time limit


class Stream:
    """Sends a request, and holds its responses until they are read.

    It is in `open_streams` until it is closed. `deadline` is of time.monotonic().
    Raises EpdError if the stream breaks at once.
    """

    def __init__(
        self,
        url: str,
        model: str,
        open_streams: set[Stream],
        inputs: list[triton.InferInput],
        outputs: list[str],
        request_id: str,
        deadline: float,
    ) -> None:
        self.url = url
        self.responses: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
        self._ended = False
        self._open = open_streams
        self._open.add(self)
        self._channel = triton.InferenceServerClient(url)
        # tritonclient's thread for the responses is a daemon if this one is. Else the interpreter would not end before
        # the request's time limit where somebody has not read an answer to its end.
        starter = threading.Thread(target=self._start, args=(deadline - time.monotonic(),), daemon=True)
        starter.start()
        starter.join()
        try:
            self._channel.async_stream_infer(
                model,
                inputs,
                outputs=[triton.InferRequestedOutput(name) for name in outputs],
                request_id=request_id,
                enable_empty_final_response=True,
            )
        except InferenceServerException as error:
            # A stream that broke at once says only here that it is broken, and says why through its callback.
            reason = error if self.responses.empty() else self.responses.get()[1] or error
            self._ended = True
            self.close()
            raise as_epd_error(reason, url) from error

    @property
    def closed(self) -> bool:
        """Nothing comes any more."""
        return self not in self._open

    def close(self) -> None:
        """Close the stream, cancelling the request unless its end has arrived; harmless the second time.

        To cancel a request that has just ended may crash Triton (its pull requests 7840 and 8078).
        """
        try:
            self._open.remove(self)
        except KeyError:
            return
        with contextlib.suppress(RuntimeError):  # in the stream's own thread, collecting garbage: it cannot be joined
            self._channel.stop_stream(cancel_requests=not self._ended)
            self._channel.close()

    def _start(self, timeout_s: float) -> None:
        self._channel.start_stream(self._receive, stream_timeout=max(0.0, timeout_s) + _MARGIN_S)

    def _receive(self, result: Any, error: InferenceServerException | None) -> None:
        if error is not None or is_final(result):
            self._ended = True
        self.responses.put((result, error))


def is_final(result: triton.InferResult) -> bool:
    """Whether this response is the last one of its request."""
    return bool(result.get_response().parameters["triton_final_response"].bool_param)
