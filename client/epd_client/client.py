"""Python client: ask a running server about images, over gRPC streaming.

with Client("localhost:8001") as client:
    for chunk in client.generate("What is in the picture?", images=["cat.png"]):
        print(chunk.text, end="")
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from epd_client.errors import EpdError, as_epd_error
from epd_client.tensors import Chunk, ImageLike, parse_response, request_message
from epd_client.timeline import Timeline

__all__ = ["MODEL", "Answer", "Chunk", "Client", "EpdError", "Generation", "ImageLike"]

MODEL = "epd_ensemble"
_MOST_S = 1e9  # of time that gRPC can count
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),  # a server that is started again is found soon
    ("grpc.max_reconnect_backoff_ms", 1000),
)


@dataclass(frozen=True)
class Answer:
    """A complete answer."""

    text: str
    finish_reason: str | None
    num_input_tokens: int
    num_output_tokens: int
    ttft_s: float  # from sending the request to the first piece of text, seen from the client
    total_s: float
    timeline: Timeline | None


class Client:
    """Talks to one server. Thread-safe: every request has a stream of its own, all of them one connection."""

    def __init__(self, url: str = "localhost:8001", *, model: str = MODEL, timeout_s: float = 300.0) -> None:
        self.url = url
        self.model = model
        self.timeout_s = timeout_s
        self._channel = grpc.insecure_channel(url, OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is still open. Nothing can be asked after it."""
        self._channel.close()

    def generate(
        self,
        text: str | None = None,
        *,
        images: Sequence[ImageLike] = (),
        messages: Sequence[Mapping[str, Any]] | None = None,
        sampling: Mapping[str, Any] | None = None,
        stream: bool = True,
        logprobs: bool = False,
        timeline: bool = False,
        request_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Generation:
        """Send a request, `text` with `images` or OpenAI-style `messages`, and return its answer as it comes.

        With `stream=False` the answer is one piece. `sampling` has the server's sampling parameters, e.g.
        `{"max_tokens": 64, "temperature": 0.7}`. `timeout_s` is for the whole answer (default: the client's), what
        its reader takes for each piece included.
        Raises ValueError for an unusable argument; iterating raises EpdError if the request fails.
        """
        request = request_message(
            self.model,
            request_id,
            text,
            images=images,
            messages=messages,
            sampling=sampling,
            stream=stream,
            logprobs=logprobs,
            timeline=timeline,
            priority=priority,
        )
        limit = self.timeout_s if timeout_s is None else timeout_s
        call = self._stub.ModelStreamInfer(iter([request]), timeout=limit if limit < _MOST_S else None)
        return Generation(call, self.url)

    def ask(self, text: str | None = None, *, on_text: Callable[[str], None] | None = None, **arguments: Any) -> Answer:
        """Like `generate`, but wait for the complete answer; `on_text` gets the pieces meanwhile. Raises EpdError."""
        begin = time.monotonic()
        first: float | None = None
        chunks = []
        for chunk in self.generate(text, **arguments):
            if first is None and chunk.text:
                first = time.monotonic()
            if on_text is not None and chunk.text:
                on_text(chunk.text)
            chunks.append(chunk)
        end = time.monotonic()
        last = chunks[-1] if chunks else Chunk("")
        return Answer(
            text="".join(chunk.text for chunk in chunks),
            finish_reason=last.finish_reason,
            num_input_tokens=last.num_input_tokens,
            num_output_tokens=sum(chunk.num_output_tokens for chunk in chunks),
            ttft_s=(first or end) - begin,
            total_s=end - begin,
            timeline=last.timeline,
        )


class Generation(Iterator[Chunk]):
    """The pieces of one answer, in order. Ends by itself; `cancel` ends it early, and so does leaving a `with`, or
    having no reference to it any more."""

    def __init__(self, call: Any, url: str) -> None:
        self._call = call  # that gRPC cancels when it is forgotten
        self._url = url
        self._over = False

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> Chunk:
        while not self._over:
            try:
                chunk = parse_response(next(self._call))
            except StopIteration:
                self._over = True
            except (grpc.RpcError, InferenceServerException) as error:
                self._await_end()
                raise as_epd_error(error, self._url) from error
            else:
                if chunk is not None:
                    if chunk.finish_reason:
                        self._await_end()
                    return chunk
        raise StopIteration

    def _await_end(self) -> None:
        """That of the stream, after that of the request: else it would be cancelled when it is forgotten.

        To cancel what has just ended may keep Triton 2.51 from ever unloading the model, or crash it (its pull requests
        7840 and 8078).
        """
        self._over = True
        with contextlib.suppress(grpc.RpcError):  # nothing is missing from the answer any more
            for _ in self._call:
                pass

    def cancel(self) -> None:
        """Stop the request on the server; harmless when it has ended."""
        if not self._over:
            self._over = True
            self._call.cancel()
