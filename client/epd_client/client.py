"""Python client: ask a running server about images, over gRPC streaming.

with Client("localhost:8001") as client:
    for chunk in client.generate("What is in the picture?", images=["cat.png"]):
        print(chunk.text, end="")
"""

from __future__ import annotations

import queue
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from epd_client.errors import EpdError, as_epd_error
from epd_client.stream import Stream, is_final
from epd_client.tensors import Chunk, ImageLike, parse_chunk, request_tensors
from epd_client.timeline import Timeline

__all__ = ["MODEL", "Answer", "Chunk", "Client", "EpdError", "Generation", "ImageLike"]

MODEL = "epd_ensemble"


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
    """Talks to one server. Thread-safe: every request has a stream of its own."""

    def __init__(self, url: str = "localhost:8001", *, model: str = MODEL, timeout_s: float = 300.0) -> None:
        self.url = url
        self.model = model
        self.timeout_s = timeout_s
        self._open: set[Stream] = set()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is still open."""
        for stream in list(self._open):
            stream.close()

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
        `{"max_tokens": 64, "temperature": 0.7}`. `timeout_s` is for the whole answer (default: the client's).
        Raises ValueError for an unusable argument; iterating raises EpdError if the request fails.
        """
        inputs, outputs = request_tensors(
            text,
            images=images,
            messages=messages,
            sampling=sampling,
            stream=stream,
            logprobs=logprobs,
            timeline=timeline,
            priority=priority,
        )
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        return Generation(Stream(self.url, self.model, self._open, inputs, outputs, request_id, deadline), deadline)

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

    def __init__(self, stream: Stream, deadline: float) -> None:
        self._stream = stream
        self._deadline = deadline
        weakref.finalize(self, stream.close)

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> Chunk:
        while not self._stream.closed:
            try:
                result, error = self._stream.responses.get(timeout=max(0.0, self._deadline - time.monotonic()))
            except queue.Empty:
                self.cancel()
                message = "no complete answer within the time limit; the request is cancelled"
                raise EpdError(message, "DEADLINE_EXCEEDED") from None
            if error is not None:
                self._stream.close()
                raise as_epd_error(error, self._stream.url) from error
            if is_final(result):
                self._stream.close()
            if result.get_response().outputs:
                return parse_chunk(result)
        raise StopIteration

    def cancel(self) -> None:
        """Stop the request on the server and close its stream; harmless when it has ended."""
        self._stream.close()
