"""Encoded image bytes: their size from the header alone, and their pixels as RGB.

`probe` runs in the orchestrator and decides how many tokens an image takes; `load` runs in the encoder. Both read
an image in the same way, so that they agree on its size. PNG orientation counts only if it stands before the pixels.
"""

from __future__ import annotations

import base64
import io

from PIL import ExifTags, Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")

# Pillow's own limit is a fixed one that only warns at first; `probe` has the configured one.
Image.MAX_IMAGE_PIXELS = None

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageError(ValueError):
    """The bytes are not an image that can be used; the message names the cause and the remedy."""


def probe(data: bytes | memoryview, max_pixels: int) -> tuple[int, int]:
    """(width, height) of the image as `load` returns it, from its header: no pixel is decoded.

    Raises ImageError for what is empty, not an image of a supported format, or larger than `max_pixels`.
    """
    with _open(data) as image:
        width, height = image.size
        if width * height > max_pixels:
            raise ImageError(
                f"the image has {width} x {height} pixels, more than the limit of {max_pixels}; "
                "send a smaller image or raise 'limits.pixels'"
            )
        return (height, width) if _orientation(image) >= 5 else (width, height)


def load(data: bytes | memoryview) -> Image.Image:
    """The image in mode RGB: first frame, turned upright as its EXIF orientation says, transparency on white.

    Does not limit the size: `probe` first. Raises ImageError.
    """
    with _open(data) as image:
        orientation = _orientation(image)
        try:
            image.load()
        except Exception as error:  # whatever a decoder raises on foreign bytes is the fault of the bytes
            raise ImageError(f"the image is truncated or damaged ({error}); send the whole file") from error
        rgb = _to_rgb(image)
    turn = _TURNS.get(orientation)
    return rgb if turn is None else rgb.transpose(turn)


def _open(data: bytes | memoryview) -> Image.Image:
    if not len(data):
        raise ImageError("the image is empty (0 bytes); send the bytes of an image file")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:  # as above: a damaged header makes Pillow's plugins raise nearly anything
        start = bytes(data[:6])
        in_base64 = base64.b64encode(start).decode()  # as it was sent, perhaps
        raise ImageError(
            f"the data is not a readable {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image (it begins with {start!r}, "
            f"in base64 '{in_base64}'); send a file in one of these formats"
        ) from error
    if min(image.size) < 1:
        raise ImageError(f"the image has {image.width} x {image.height} pixels; send one with at least one pixel")
    return image


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8; 1, upright, where there is none or it cannot be read."""
    try:
        # The method of the base class: PNG's own decodes the whole image in search of a late EXIF chunk.
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF data is no reason to refuse the pixels
        return 1
    return orientation if orientation in _TURNS else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        image = _to_8_bits(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def _to_8_bits(image: Image.Image) -> Image.Image:
    """16-bit greyscale scaled to 8 bits, which convert() would clip at 255; a transparent value becomes alpha."""
    grey = image.point(lambda value: value * (1 / 257) + 0.5).convert("L")
    clear = grey.info.pop("transparency", None)
    if clear is not None:
        grey.putalpha(image.convert("I").point([0 if value == clear else 255 for value in range(65536)], "L"))
    return grey
