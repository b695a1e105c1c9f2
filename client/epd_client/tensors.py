"""A request and the pieces of its answer as tensors of the orchestrator's model."""

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
