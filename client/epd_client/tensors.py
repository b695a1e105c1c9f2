"""A request and the pieces of its answer as messages of Triton's gRPC protocol (KServe v2)."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from PIL import Image, UnidentifiedImageError
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from epd_client.timeline import Timeline

ImageLike = str | Path | bytes | Image.Image

BOOLEAN_OUTPUTS = {
    "return_finish_reason": "finish_reason",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
    "return_timeline": "timeline",
}


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


def request_message(
    model: str,
    request_id: str,
    text: str | None = None,
    *,
    images: Sequence[ImageLike] = (),
    messages: Sequence[Mapping[str, Any]] | None = None,
    sampling: Mapping[str, Any] | None = None,
    stream: bool = True,
    logprobs: bool = False,
    timeline: bool = False,
    priority: int = 0,
) -> service_pb2.ModelInferRequest:
    """A request as `Client.generate` has it. Raises ValueError for arguments that make none."""
    if (text is None) == (messages is None):
        raise ValueError("give either text or messages")
    if isinstance(images, str | bytes):
        raise ValueError("images is a list, of one if there is one")
    wanted = {"return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"}
    wanted |= {"return_cumulative_logprob", "return_logprobs"} if logprobs else set()
    wanted |= {"return_timeline"} if timeline else set()
    message = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name in ("text_output", *(BOOLEAN_OUTPUTS[name] for name in sorted(wanted))):
        message.outputs.add(name=name)

    def add(name: str, datatype: str, content: bytes, count: int = 1) -> None:
        message.inputs.add(name=name, datatype=datatype, shape=[count])
        message.raw_input_contents.append(content)

    def add_bytes(name: str, *values: bytes) -> None:
        add(name, "BYTES", serialize_byte_tensor(np.array(values, dtype=object)).item(), len(values))

    flags = {"stream": stream, "exclude_input_in_output": True, **dict.fromkeys(sorted(wanted), True)}
    for name, flag in flags.items():
        add(name, "BOOL", bytes([bool(flag)]))
    if text is not None:
        add_bytes("text_input", text.encode())
    if images:
        add_bytes("image", *(encode_image(image) for image in images))
    if messages is not None:
        add_bytes("messages", json.dumps(list(messages)).encode())
    if sampling:
        add_bytes("sampling_parameters", json.dumps(dict(sampling)).encode())
    if priority:  # an input of its own: Triton keeps the request parameter of that name to itself
        add("priority", "INT32", priority.to_bytes(4, "little", signed=True))
    return message


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


def parse_response(response: service_pb2.ModelStreamInferResponse) -> Chunk | None:
    """A response of the server; None for one that carries nothing. Raises InferenceServerException for an error."""
    if response.error_message:
        raise InferenceServerException(response.error_message)
    if not response.infer_response.outputs:
        return None
    result = triton.InferResult(response.infer_response)

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
