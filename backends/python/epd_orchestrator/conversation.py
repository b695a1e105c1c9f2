"""OpenAI chat JSON -> messages for the chat template, and the images in the order in which the prompt names them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from epd_scheduler.request import RefusedError

from epd_orchestrator.media import decode_url

_CONTENT = "'content' must be a string or an array of {'type': 'text' | 'image_url' | 'image'} parts"


def parse(text: str, images: Sequence[bytes], placeholder: str) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Check the JSON array `text`.

    A part {"type": "image_url", "image_url": {"url": "data:..."}} brings its own image, {"type": "image"} takes the
    next of `images`, all of which must be used. String contents become one text part, so that templates see one form.
    Returns the messages and all images in order. Raises RefusedError.
    """
    try:
        raw = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:  # the second: nested too deeply
        raise _refuse(f"not valid JSON ({error})") from error
    if not isinstance(raw, list) or not raw:
        raise _refuse("must be a non-empty array of {'role': ..., 'content': ...}")
    given, used = iter(images), list[bytes]()
    messages = [_message(f"message {index}", value, given, used, placeholder) for index, value in enumerate(raw)]
    if left := len(list(given)):
        raise _refuse(
            f"the 'image' input has {len(images)} images, but the messages use {len(images) - left} of them; "
            "add a part {'type': 'image'} for each"
        )
    return messages, used


def _refuse(message: str) -> RefusedError:
    return RefusedError("invalid_argument", f"messages: {message}")


def _message(where: str, raw: Any, given: Iterator[bytes], used: list[bytes], placeholder: str) -> dict[str, Any]:
    if not isinstance(raw, dict) or not isinstance(raw.get("role"), str):
        raise _refuse(f"{where} must be an object with a string 'role'")
    content = raw.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise _refuse(f"{where}: {_CONTENT}")
    return {
        "role": raw["role"],
        "content": [
            _part(f"{where}, part {index}", part, given, used, placeholder) for index, part in enumerate(parts)
        ],
    }


def _part(where: str, raw: Any, given: Iterator[bytes], used: list[bytes], placeholder: str) -> dict[str, str]:
    kind = raw.get("type") if isinstance(raw, dict) else None
    if kind == "text":
        return {"type": "text", "text": _text(where, raw.get("text"), placeholder)}
    if kind == "image_url":
        url = raw.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        if not isinstance(url, str):
            raise _refuse(f"{where}: 'image_url' must be {{'url': 'data:image/png;base64,...'}}")
        used.append(decode_url(url, f"messages: {where}"))
    elif kind == "image":
        image = next(given, None)
        if image is None:
            raise _refuse(f"{where} takes an image from the 'image' input, which has no more; send one for each part")
        used.append(image)
    else:
        raise _refuse(f"{where}: {_CONTENT}, got {str(kind)[:40]!r}")
    return {"type": "image"}


def _text(where: str, text: Any, placeholder: str) -> str:
    if not isinstance(text, str):
        raise _refuse(f"{where}: 'text' must be a string")
    if placeholder in text:
        raise _refuse(f"{where}: the text contains the image placeholder '{placeholder}'; send images as parts instead")
    return text
