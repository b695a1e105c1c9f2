"""Good and bad image files: sizes from headers, pixels as RGB."""

import io
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from epd_backend.images import ImageError, load, probe
from PIL import Image

MAX = 1_000_000
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def encoded(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def corners():
    """4 x 2 pixels: red top left, green top right, blue bottom left."""
    image = Image.new("RGB", (4, 2), "white")
    for at, colour in (((0, 0), RED), ((3, 0), GREEN), ((0, 1), BLUE)):
        image.putpixel(at, colour)
    return image


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats(kind):
    data = encoded(Image.new("RGB", (31, 17), (10, 200, 30)), kind)
    for given in (data, memoryview(data)):
        assert probe(given, MAX) == (31, 17)
        image = load(given)
        assert (image.mode, image.size) == ("RGB", (31, 17))
        assert max(abs(a - b) for a, b in zip(image.getpixel((15, 8)), (10, 200, 30), strict=True)) <= 3


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize(
    ("orientation", "size", "red", "green", "blue"),
    [
        (1, (4, 2), (0, 0), (3, 0), (0, 1)),
        (2, (4, 2), (3, 0), (0, 0), (3, 1)),
        (3, (4, 2), (3, 1), (0, 1), (3, 0)),
        (4, (4, 2), (0, 1), (3, 1), (0, 0)),
        (5, (2, 4), (0, 0), (0, 3), (1, 0)),
        (6, (2, 4), (1, 0), (1, 3), (0, 0)),
        (7, (2, 4), (1, 3), (1, 0), (0, 3)),
        (8, (2, 4), (0, 3), (0, 0), (1, 3)),
        (99, (4, 2), (0, 0), (3, 0), (0, 1)),
    ],
)
def test_exif_orientation_is_applied(kind, orientation, size, red, green, blue):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(corners(), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    assert probe(data, MAX) == size
    image = load(data)
    assert image.size == size
    assert [image.getpixel(at) for at in (red, green, blue)] == [RED, GREEN, BLUE]


def test_jpeg_turned_and_damaged_exif():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(Image.new("RGB", (300, 200)), "JPEG", exif=exif)
    assert probe(data, MAX) == load(data).size == (200, 300)
    damaged = data.replace(b"Exif\x00\x00MM\x00*", b"Exif\x00\x00XX\x00*").replace(
        b"Exif\x00\x00II*", b"Exif\x00\x00XX*"
    )
    assert damaged != data
    assert probe(damaged, MAX) == load(damaged).size == (300, 200)


def test_orientation_behind_the_pixels_is_ignored_by_both():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(corners(), "PNG", exif=exif)
    chunk = data[data.index(b"eXIf") - 4 :]
    chunk = chunk[: 12 + struct.unpack(">I", chunk[:4])[0]]
    end = data.index(b"IEND") - 4
    late = data[:end].replace(chunk, b"") + chunk + data[end:]
    assert probe(late, MAX) == load(late).size == (4, 2)


def test_alpha_is_composited_on_white():
    rgba = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    rgba.putpixel((1, 0), (0, 0, 0, 128))
    for data in (encoded(rgba), encoded(rgba, "WEBP", lossless=True, exact=True)):
        assert [load(data).getpixel((x, 0)) for x in (0, 1)] == [WHITE, (127, 127, 127)]
    grey = Image.new("LA", (1, 1), (0, 0))
    assert load(encoded(grey)).getpixel((0, 0)) == WHITE


def test_palette():
    image = Image.new("P", (2, 1))
    image.putpalette([*RED, *BLUE])
    image.putpixel((1, 0), 1)
    opaque = load(encoded(image))
    assert [opaque.getpixel((x, 0)) for x in (0, 1)] == [RED, BLUE]
    transparent = load(encoded(image, transparency=0))
    assert [transparent.getpixel((x, 0)) for x in (0, 1)] == [WHITE, BLUE]


def test_transparent_colour_of_images_without_alpha():
    image = corners()
    assert load(encoded(image, transparency=RED)).getpixel((0, 0)) == WHITE
    assert load(encoded(image, transparency=RED)).getpixel((3, 0)) == GREEN


def test_cmyk():
    data = encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=95)
    assert max(abs(a - b) for a, b in zip(load(data).getpixel((4, 4)), RED, strict=True)) <= 3


def test_bilevel_and_16_bit_greyscale_are_scaled():
    assert load(encoded(Image.new("1", (1, 1), 1))).getpixel((0, 0)) == WHITE
    values = np.array([[0, 257, 128 * 257, 40000, 65535]], np.uint16)
    image = load(encoded(Image.fromarray(values)))
    assert [image.getpixel((x, 0))[0] for x in range(5)] == [0, 1, 128, 156, 255]


def test_16_bit_greyscale_with_transparent_value():
    header = struct.pack(">IIBBBBB", 2, 1, 16, 0, 0, 0, 0)
    pixels = zlib.compress(b"\x00" + struct.pack(">HH", 40000, 0))
    chunks = [(b"IHDR", header), (b"tRNS", struct.pack(">H", 40000)), (b"IDAT", pixels), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
    assert [load(data).getpixel((x, 0)) for x in (0, 1)] == [WHITE, (0, 0, 0)]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_first_frame_of_an_animation(kind):
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, BLUE)]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=100, **options)
    assert probe(data, MAX) == (16, 16)
    assert load(data).getpixel((8, 8)) == RED


def test_smallest_and_thinnest():
    for size in ((1, 1), (1, 5000), (5000, 1)):
        data = encoded(Image.new("RGB", size))
        assert probe(data, MAX) == load(data).size == size


@pytest.mark.parametrize("read", [load, lambda data: probe(data, MAX)])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty .0 bytes.; send"),
        (
            b"not an image at all",
            "not a readable PNG, JPEG, WEBP, GIF or BMP image .it begins with b'not an', in base64 'bm90IGFu'.; send",
        ),
        (encoded(Image.new("RGB", (9, 9)), "TIFF"), "not a readable PNG"),
        (b"\x89PNG\r\n\x1a\n", "not a readable PNG"),
        (encoded(Image.new("RGB", (99, 99)), "JPEG")[:30], "not a readable PNG"),
    ],
)
def test_bad_files(read, data, message):
    with pytest.raises(ImageError, match=message):
        read(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_truncated_files(kind):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    data = encoded(noise, kind)
    with pytest.raises(ImageError, match=r"truncated or damaged .*; send the whole file|not a readable"):
        load(data[: len(data) // 2])


def test_bomb_is_refused_from_its_header():
    """The PNG says that it has 60000 x 60000 pixels and has none: decoding it would be another error."""
    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    data = b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    with pytest.raises(ImageError, match=r"60000 x 60000 pixels, more than the limit of 1000000; .*'limits.pixels'"):
        probe(data, MAX)
    assert probe(encoded(Image.new("L", (1000, 1000))), MAX) == (1000, 1000)


def test_random_damage_raises_nothing_but_image_errors():
    rng = np.random.default_rng(1)
    exif = Image.Exif()
    exif[0x0112] = 6
    originals = [encoded(corners().resize((32, 16)), kind, exif=exif) for kind in ("PNG", "JPEG", "WEBP")]
    originals += [encoded(corners(), "GIF"), encoded(corners(), "BMP")]
    for data in originals:
        for _ in range(60):
            damaged = bytearray(data)
            for at in rng.integers(0, len(data), rng.integers(1, 8)):
                damaged[at] = rng.integers(0, 256)
            try:
                size = probe(bytes(damaged), MAX)
                assert load(bytes(damaged)).size == size
            except ImageError:
                pass


def test_import_is_light():
    code = (
        "import sys, epd_backend.images, epd_backend.families, epd_backend.procfs, epd_backend.doorbell\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
