"""Images as clients send them -> encoded bytes."""

from __future__ import annotations

import base64
import binascii

from epd_scheduler.request import RefusedError


def decode_image(data: bytes, what: str) -> bytes:
    """The encoded image in an element of the `image` input: a data URI, base64, or the encoded bytes themselves.

    No image format is pure ASCII, so ASCII is taken as base64. Raises RefusedError, whose message begins with `what`.
    """
    if data.startswith(b"data:"):
        return decode_data_uri(data, what)
    return _decode_base64(data, what) if data.isascii() else data


def decode_url(url: str, what: str) -> bytes:
    """The bytes of a data URI. Raises RefusedError for every other URL."""
    if not url.startswith("data:"):
        raise RefusedError(
            "invalid_argument",
            f"{what}: the server fetches nothing; send the image itself as a data URI "
            f"('data:image/png;base64,...') instead of '{url:.60}'",
        )
    return decode_data_uri(url.encode(), what)


def decode_data_uri(uri: bytes, what: str) -> bytes:
    """The bytes of 'data:[type];base64,...'. Raises RefusedError."""
    header, comma, payload = uri.partition(b",")
    if not comma or not header.lower().endswith(b";base64"):
        raise RefusedError("invalid_argument", f"{what}: a data URI must have the form 'data:image/png;base64,...'")
    return _decode_base64(payload, what)


def _decode_base64(text: bytes, what: str) -> bytes:
    try:
        return base64.b64decode(b"".join(text.split()), validate=True)
    except binascii.Error as error:
        raise RefusedError(
            "invalid_argument",
            f"{what}: neither an encoded image nor valid base64 ({error}): it is text that begins with {text[:20]!r}; "
            "send the bytes of an image file, or their base64",
        ) from error
