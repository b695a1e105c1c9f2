"""Python client: ask a running server about images, over gRPC streaming.

with Client("localhost:8001") as client:
    for chunk in client.generate("What is in the picture?", images=["cat.png"]):
        print(chunk.text, end="")
"""

from __future__ import annotations

import io
import json
import queue
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from PIL import Image, UnidentifiedImageError
from tritonclient.utils import InferenceServerException

from epd_client.timeline import Timeline

ImageLike = str | Path | bytes | Image.Image

MODEL = "epd_ensemble"
STREAM_MARGIN_S = 10.0  # a stream that nobody closes ends so long after its request's time limit
BOOLEAN_OUTPUTS = {
    "return_finish_reason": "finish_reason",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
    "return_timeline": "timeline",
}


class EpdError(RuntimeError):
    """A request failed. `code` is the gRPC status ("INVALID_ARGUMENT", "UNAVAILABLE", "DEADLINE_EXCEEDED", ...)."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer. Only the last one has `finish_reason` and `timeline`."""

    text: str
    finish_reason: str | None = None  # "stop" or "length"
    num_input_tokens: int = 0  # tokens of the prompt, images included
    num_output_tokens: int = 0  # tokens of this piece
    cumulative_logprob: float | None = None  # only with `logprobs`; natural log, of the answer up to here
    logprobs: Any = None  # only with `logprobs`: a list with one mapping a token of this piece
    timeline: Timeline | None = None  # only with `timeline`


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
        self._open: set[Generation] = set()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is still open."""
        for generation in list(self._open):
            generation.cancel()

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
        return Generation(self, inputs, outputs, request_id, deadline)

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
    """The pieces of one answer, in order. Ends by itself; `cancel` ends it early, and so does leaving a `with`."""

    def __init__(
        self,
        client: Client,
        inputs: list[triton.InferInput],
        outputs: list[str],
        request_id: str,
        deadline: float,
    ) -> None:
        self._owner = client
        self._deadline = deadline
        self._responses: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
        self._done = False
        self._stream = triton.InferenceServerClient(client.url)
        client._open.add(self)
        try:
            self._stream.start_stream(
                lambda result, error: self._responses.put((result, error)),
                stream_timeout=max(0.0, deadline - time.monotonic()) + STREAM_MARGIN_S,
            )
            self._stream.async_stream_infer(
                client.model,
                inputs,
                outputs=[triton.InferRequestedOutput(name) for name in outputs],
                request_id=request_id,
                enable_empty_final_response=True,
            )
        except InferenceServerException as error:
            # A stream that broke at once says only here that it is broken, and says why through its callback.
            reason = error if self._responses.empty() else self._responses.get()[1] or error
            self._close(cancel=False)
            raise as_epd_error(reason, client.url) from error

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> Chunk:
        while not self._done:
            try:
                result, error = self._responses.get(timeout=max(0.0, self._deadline - time.monotonic()))
            except queue.Empty:
                self.cancel()
                message = "no complete answer within the time limit; the request is cancelled"
                raise EpdError(message, "DEADLINE_EXCEEDED") from None
            if error is not None:
                self._close(cancel=False)
                raise as_epd_error(error, self._owner.url) from error
            response = result.get_response()
            final = response.parameters["triton_final_response"].bool_param
            if final:
                self._close(cancel=False)
            if response.outputs:
                return parse_chunk(result)
        raise StopIteration

    def cancel(self) -> None:
        """Stop the request on the server and close its stream; harmless when it has ended."""
        self._close(cancel=True)

    def _close(self, cancel: bool) -> None:
        """`cancel` only what has not ended: what just did may crash Triton (its pull requests 7840 and 8078)."""
        if not self._done:
            self._done = True
            self._owner._open.discard(self)
            self._stream.stop_stream(cancel_requests=cancel)
            self._stream.close()


def request_tensors(
    text: str | None = None,
    *,
    images: Sequence[ImageLike] = (),
    messages: Sequence[Mapping[str, Any]] | None = None,
    sampling: Mapping[str, Any] | None = None,
    stream: bool = True,
    logprobs: bool = False,
    timeline: bool = False,
    priority: int = 0,
) -> tuple[list[triton.InferInput], list[str]]:
    """Input tensors and names of the wanted outputs of a request, as `Client.generate` has it. Raises ValueError."""
    if (text is None) == (messages is None):
        raise ValueError("give either text or messages")
    wanted = {"return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"}
    wanted |= {"return_cumulative_logprob", "return_logprobs"} if logprobs else set()
    wanted |= {"return_timeline"} if timeline else set()
    inputs = [_flag("stream", stream), _flag("exclude_input_in_output", True)]
    inputs += [_flag(name, True) for name in sorted(wanted)]
    if text is not None:
        inputs.append(_bytes("text_input", [text.encode()]))
    if images:
        inputs.append(_bytes("image", [encode_image(image) for image in images]))
    if messages is not None:
        inputs.append(_bytes("messages", [json.dumps(list(messages)).encode()]))
    if sampling:
        inputs.append(_bytes("sampling_parameters", [json.dumps(dict(sampling)).encode()]))
    outputs = ["text_output", *(BOOLEAN_OUTPUTS[name] for name in sorted(wanted))]
    if priority:  # an input of its own: Triton keeps the request parameter of that name to itself
        tensor = triton.InferInput("priority", [1], "INT32")
        tensor.set_data_from_numpy(np.array([priority], np.int32))
        inputs.append(tensor)
    return inputs, outputs


def encode_image(image: ImageLike) -> bytes:
    """Encoded image bytes: a file's as they are, a PIL image as PNG. Raises ValueError if the file is not an image."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, Image.Image):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return buffer.getvalue()
    try:
        data = Path(image).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the image {image}: {error.strerror}") from error
    try:
        Image.open(io.BytesIO(data)).close()
    except UnidentifiedImageError as error:
        raise ValueError(f"{image} is not an image; name a PNG, JPEG, WEBP, GIF or BMP file") from error
    except Exception:  # one that is damaged or huge: the server says what is wrong with it
        pass
    return data


def _bytes(name: str, values: list[bytes]) -> triton.InferInput:
    tensor = triton.InferInput(name, [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array(values, dtype=object))
    return tensor


def _flag(name: str, value: bool) -> triton.InferInput:
    tensor = triton.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value]))
    return tensor


def parse_chunk(result: Any) -> Chunk:
    """A response of the server, of either of tritonclient's gRPC clients."""

    def first(name: str) -> Any:
        tensor = result.as_numpy(name)
        return None if tensor is None or tensor.size == 0 else tensor.ravel()[0]

    def text(name: str) -> str | None:
        value = first(name)
        return value.decode() if value not in (None, b"", b"None") else None  # "None": vLLM's "not finished"

    logprobs, timeline, cumulative = text("logprobs"), text("timeline"), first("cumulative_logprob")
    return Chunk(
        text=(first("text_output") or b"").decode(),
        finish_reason=text("finish_reason"),
        num_input_tokens=int(first("num_input_tokens") or 0),
        num_output_tokens=int(first("num_output_tokens") or 0),
        cumulative_logprob=None if cumulative is None else float(cumulative),
        logprobs=json.loads(logprobs) if logprobs else None,
        timeline=Timeline.from_json(timeline) if timeline else None,
    )


def as_epd_error(error: InferenceServerException, url: str) -> EpdError:
    """What tritonclient raised, with the remedy where there is no server, or a model without its process.

    Of an error in a stream, Triton passes on the text alone, so that the text begins with the status. (It would pass on
    the status if asked to by `triton_grpc_error`, but such errors crash Triton 2.51 now and then.)
    """
    code = str(error.status() or "INTERNAL").removeprefix("StatusCode.")
    message = error.message()
    if stated := re.match(r"\[([A-Z_]+)\] ", message):
        code, message = stated[1], message[stated.end() :]
    if code == "UNAVAILABLE" and "connect" in message.lower():
        message = f"no server answers at {url} ({message}); start one with `epd serve`"
    if code == "CANCELLED" and "Locally" not in message:  # not by this client: gRPC says "Locally cancelled" then
        code = "UNAVAILABLE"
        message = f"the server has ended the call, as it does when it stops ({message}); send the request again later"
    if died := re.search(r"Stub process '(.+)_\d+_\d+' is not healthy", message):
        message = f"the process of model '{died[1]}' has died ({message}); start it again with `epd reload {died[1]}`"
    if unloaded := re.search(r"'(.+)' has no available versions", message):
        code = "UNAVAILABLE"
        message = (
            f"model '{unloaded[1]}' is not loaded ({message}); wait until it is, or run `epd reload {unloaded[1]}`"
        )
    return EpdError(message, code)
