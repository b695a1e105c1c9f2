"""Bad input: each is an error that names its cause, and harms no request that runs at the same time.

Unusual but good images are read as what they show.
"""

from __future__ import annotations

import base64
import io
import json
import queue
import struct
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from epd_client.client import Client, EpdError
from epd_client.launch import Server
from PIL import Image
from tritonclient.utils import InferenceServerException

from models import digits
from tests.reference import Reference
from tests.triton.test_smoke import IMAGES, READING

PAD = "<|image_pad|>"
VISION = f"<|vision_start|>{PAD}<|vision_end|>"
CONTEXT = 4096  # deploy/epd.yaml
NEIGHBOUR_TOKENS = 40


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def blank(width: int, height: int) -> bytes:
    return encoded(Image.new("RGB", (width, height)))


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has no pixels."""
    body = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", body), (b"IDAT", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (112, 112, 3), np.uint8))
GOOD = encoded(IMAGES[0])
TRUNCATED = encoded(NOISE, "JPEG")[:2000]  # its header is whole: only the encoder finds out


@pytest.fixture(scope="module")
def reference() -> Reference:
    torch.set_num_threads(1)
    return Reference(digits.CHECKPOINT)


@pytest.fixture(scope="module")
def right(reference: Reference) -> str:
    """What a neighbour, who asks about six images, is answered."""
    content = [{"type": "image", "image": image} for image in IMAGES]
    prompt = [{"role": "user", "content": [*content, {"type": "text", "text": digits.QUESTION}]}]
    text = reference.text(reference.generate(prompt, NEIGHBOUR_TOKENS, ignore_eos=True))
    assert text.startswith(READING)
    return text


@pytest.fixture
def neighbour(client: Client, right: str) -> Iterator[None]:
    """A request that is being answered while the test runs."""
    sampling = {"max_tokens": NEIGHBOUR_TOKENS, "ignore_eos": True}
    chunks = client.generate(digits.QUESTION, images=IMAGES, sampling=sampling)
    first = next(chunks).text
    yield
    assert first + "".join(chunk.text for chunk in chunks) == right


def refusal(
    client: Client, text: str | None = digits.QUESTION, code: str = "INVALID_ARGUMENT", **arguments: Any
) -> str:
    with pytest.raises(EpdError) as caught:
        client.ask(text, **arguments)
    assert caught.value.code == code
    return str(caught.value)


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize(
    ("image", "message"),
    [
        pytest.param(b"\xffnot an image", "image 1 of 2: the data is not a readable PNG, JPEG", id="not an image"),
        pytest.param(b"", "image 1 of 2: the image is empty (0 bytes)", id="zero bytes"),
        pytest.param(base64.b64encode(GOOD)[:-3], "image 1: neither an encoded image nor valid base64", id="base64"),
        pytest.param(b"data:image/png;base64,@", "image 1: neither an encoded image nor valid base64", id="data URI"),
        pytest.param(b"data:image/png,abc", "image 1: a data URI must have the form", id="data URI without base64"),
        pytest.param(base64.b64encode(b"text"), "image 1 of 2: the data is not a readable", id="base64 of no image"),
        pytest.param(b"https://a.b/c.png", "image 1: neither an encoded image nor valid base64", id="URL"),
        pytest.param(GOOD[:20], "image 1 of 2: the data is not a readable", id="header alone"),
        pytest.param(TRUNCATED, "image 1: the image is truncated or damaged", id="truncated JPEG"),
        pytest.param(encoded(NOISE)[:9000], "image 1: the image is truncated or damaged", id="truncated PNG"),
        pytest.param(png_header(100, 100), "image 1: the image is truncated or damaged", id="header without pixels"),
        pytest.param(blank(1, 5000), "1 x 5000 pixels has an aspect ratio above 200; crop or pad it", id="thin"),
        pytest.param(blank(5000, 1), "5000 x 1 pixels has an aspect ratio above 200; crop or pad it", id="flat"),
        pytest.param(
            png_header(60_000, 60_000),
            "60000 x 60000 pixels, more than the limit of 64000000; send a smaller image or raise 'limits.pixels'",
            id="decompression bomb",
        ),
        pytest.param(
            np.random.default_rng(1).bytes(34_000_000), "34000000 bytes, the limit is 33554432", id="huge garbage"
        ),
    ],
)
def test_bad_images(client: Client, image: bytes, message: str) -> None:
    assert message in refusal(client, images=[GOOD, image])


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize(
    ("text", "images", "message"),
    [
        (VISION * 2 + "a", 1, f"'text_input' has 2 placeholders '{PAD}', but 1 images came with it"),
        (VISION + "a", 2, f"'text_input' has 1 placeholders '{PAD}', but 2 images came with it"),
        (f"what is {PAD}?", 0, f"'text_input' has 1 placeholders '{PAD}', but 0 images came with it"),
        ("<|video_pad|>", 1, "videos are not supported, send frames as images"),
        ("a", 33, "33 images, the limit is 32; send fewer or raise 'limits.images'"),
        ("", 0, "'text_input' is empty"),
        ("", 1, "'text_input' is empty"),
        ("a" * CONTEXT, 0, "the prompt has 4096 tokens, the context is 4096; shorten it or raise 'limits.context'"),
        ("a b " * 5_000_000, 0, "the prompt has 20000000 characters, at most 65536 can fit"),
    ],
    ids=["more placeholders", "fewer", "typed", "video", "images", "empty", "empty, image", "long", "20 MB"],
)
def test_bad_prompts(client: Client, text: str, images: int, message: str) -> None:
    assert message in refusal(client, text, images=[GOOD] * images)


@pytest.mark.usefixtures("neighbour")
def test_images_past_the_context(client: Client) -> None:
    assert "the context is 4096" in refusal(client, images=[blank(1500, 1500)] * 4)


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            f"what is {PAD}?",
            f"message 0, part 0: the text contains the image placeholder '{PAD}'; send images as parts",
        ),
        ([{"type": "image"}], "message 0, part 0 takes an image from the 'image' input, which has no more"),
        ([{"type": "audio"}], "part 0: 'content' must be a string or an array"),
        ([{"type": "image_url", "image_url": {"url": "http://a/b.png"}}], "the server fetches nothing"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}], "the image is empty (0 bytes)"),
    ],
)
def test_bad_messages(client: Client, content: Any, message: str) -> None:
    assert message in refusal(client, None, messages=[{"role": "user", "content": content}])


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"max_tokens": 0}, "'max_tokens' must be at least 1, got 0"),
        ({"max_tokens": 2049}, "'max_tokens' is 2049, the limit is 2048; lower it or raise 'limits.output_tokens'"),
        ({"max_tokens": "many"}, "'max_tokens' must be an integer, got 'many'"),
        ({"max_tokens": 1.5}, "'max_tokens' must be an integer, got a number"),
        ({"max_tokens": 2, "min_tokens": 3}, "'min_tokens' (3) must not exceed 'max_tokens' (2)"),
        ({"temprature": 1}, "unknown key 'temprature'; did you mean 'temperature'?"),
        ({"n": 2}, "unknown key 'n'; known keys: temperature, top_p,"),
        ({"temperature": -1}, "'temperature' must be at least 0, got -1"),
        ({"temperature": "hot"}, "'temperature' must be a number, got 'hot'"),
        ({"temperature": float("nan")}, "not valid JSON"),
        ({"temperature": "nan"}, "'temperature' must be finite, got nan"),
        ({"top_p": 0}, "'top_p' must be more than 0 and at most 1, got 0"),
        ({"seed": -1}, "'seed' must be at least 0"),
        ({"stop": [""]}, "'stop' must not hold an empty string"),
        ({"stop_token_ids": [288]}, "'stop_token_ids' must be at least 0 and at most 287, got 288"),
        ({"logit_bias": {"1": 1000}}, "'logit_bias' must be at least -100 and at most 100, got 1000"),
        ({"logprobs": 21}, "'logprobs' must be at least 0 and at most 20, got 21"),
        ({"ignore_eos": "yes"}, "'ignore_eos' must be true or false, got a string"),
    ],
)
def test_bad_sampling_parameters(client: Client, sampling: dict[str, Any], message: str) -> None:
    assert message in refusal(client, sampling=sampling)


@pytest.mark.usefixtures("neighbour")
def test_prompt_and_output_past_the_context(client: Client) -> None:
    message = refusal(client, "a" * 3000, sampling={"max_tokens": 1097})
    assert "together more than the context of 4096; lower 'max_tokens' to 1096" in message
    assert client.ask("a" * 4095, sampling={"max_tokens": 1, "ignore_eos": True}).num_output_tokens == 1


def raw(server: Server, tensors: dict[str, tuple[str, Any]]) -> str:
    """The error that a request of these tensors meets: name -> (Triton's data type, value)."""
    answers: queue.Queue[Any] = queue.Queue()
    inputs = []
    for name, (datatype, value) in tensors.items():
        inputs.append(triton.InferInput(name, list(value.shape), datatype))
        inputs[-1].set_data_from_numpy(value)
    with triton.InferenceServerClient(server.grpc) as stream:
        stream.start_stream(lambda result, error: answers.put(error or result), stream_timeout=90)
        stream.async_stream_infer("epd_ensemble", inputs)
        answer = answers.get(timeout=60)
        stream.stop_stream(cancel_requests=True)
    assert isinstance(answer, InferenceServerException), answer
    return str(answer)


def strings(*values: bytes) -> tuple[str, Any]:
    return "BYTES", np.array(values, object)


A = strings(b"a")


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "give exactly one of 'text_input' and 'messages'"),
        ({"text_input": A, "messages": strings(b"[]")}, "give exactly one of 'text_input' and 'messages'"),
        ({"text_input": ("INT32", np.zeros(1, np.int32))}, "data-type is 'INT32', but model 'epd_ensemble' expects"),
        ({"text_input": strings(b"a", b"b")}, "unexpected shape for input 'text_input'"),
        ({"text_input": strings()}, "unexpected shape for input 'text_input'"),
        ({"text_input": A, "image": ("UINT8", np.frombuffer(GOOD, np.uint8))}, "data-type is 'UINT8'"),
        ({"text_input": A, "image": ("BYTES", np.array([[GOOD, GOOD]], object))}, "unexpected shape for input 'image'"),
        ({"text_input": A, "stream": ("INT32", np.ones(1, np.int32))}, "data-type is 'INT32'"),
        ({"text_input": A, "priority": ("INT64", np.ones(1, np.int64))}, "data-type is 'INT64'"),
        ({"text_input": A, "unknown": A}, "unexpected inference input 'unknown'"),
        ({"text_input": strings(b"\xff\xfe")}, "'text_input' is not UTF-8"),
        ({"text_input": A, "sampling_parameters": strings(b"\xff")}, "'sampling_parameters' is not UTF-8"),
        ({"text_input": A, "sampling_parameters": strings(b"{")}, "sampling_parameters: not valid JSON"),
        ({"text_input": A, "sampling_parameters": strings(b"[]")}, "must be a JSON object, got an array"),
        ({"text_input": A, "sampling_parameters": strings(b'{"top_p": NaN}')}, "sampling_parameters: not valid JSON"),
        ({"text_input": A, "sampling_parameters": strings(b"[" * 100_000)}, "not valid JSON (maximum recursion depth"),
        ({"messages": strings(b"[" * 100_000)}, "messages: not valid JSON (maximum recursion depth"),
        ({"messages": strings(b"{}")}, "messages: must be a non-empty array"),
        ({"messages": strings(b'[{"role": 1, "content": "a"}]')}, "message 0 must be an object with a string 'role'"),
        ({"messages": strings(b'[{"role": "user"}]')}, "message 0: 'content' must be a string or an array"),
        ({"messages": strings(b'[{"role": "user", "content": "a"}]'), "image": strings(GOOD)}, "the messages use 0"),
    ],
)
def test_bad_tensors(server: Server, tensors: dict[str, tuple[str, Any]], message: str) -> None:
    assert message in raw(server, tensors)


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("generate", b"{", 500, "failed to parse the request JSON buffer"),  # Triton's own
        ("generate", b'{"text_input": 5}', 500, "Unable to parse JSON bytes array"),
        ("generate", b"{}", 400, "give exactly one of 'text_input' and 'messages'"),
        (
            "generate",
            b'{"text_input": "a", "max_token": 5}',
            400,
            "unknown key 'max_token'; did you mean 'max_tokens'?",
        ),
        ("generate", b'{"text_input": "a", "temperature": NaN}', 400, "not valid JSON"),
        ("generate_stream", b'{"text_input": "a", "stream": true, "max_tokens": 0}', 400, "'max_tokens' must be"),
    ],
)
def test_bad_http(server: Server, path: str, body: bytes, status: int, message: str) -> None:
    url = f"http://{server.http}/v2/models/epd_ensemble/{path}"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=60)
    assert caught.value.code == status
    assert message in json.loads(caught.value.read().decode().removeprefix("data: "))["error"]


@pytest.mark.parametrize("model", ["encoder", "prefill", "decode"])
@pytest.mark.parametrize("plans", [b"\x01\x02", b"\xff" * 1_000_000], ids=["short", "long"])
@pytest.mark.usefixtures("neighbour")
def test_garbage_sent_to_a_worker(server: Server, model: str, plans: bytes) -> None:
    tensor = triton.InferInput("PLANS", [len(plans)], "UINT8")
    tensor.set_data_from_numpy(np.frombuffer(plans, np.uint8))
    with (
        triton.InferenceServerClient(server.grpc) as worker,
        pytest.raises(InferenceServerException, match="ValidationError"),
    ):
        worker.infer(model, [tensor], client_timeout=60)


def test_a_bad_image_spoils_no_other_of_its_batch(client: Client) -> None:
    """Requests that come together are encoded together; some even share the bad image, at different places."""

    def ask(index: int) -> str:
        images: list[Any] = [*IMAGES]
        if index % 3 == 0:
            images.insert(index // 3, TRUNCATED)
        try:
            return client.ask(digits.QUESTION, images=images, sampling={"max_tokens": 16}).text
        except EpdError as error:
            return str(error)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    for index, answer in enumerate(answers):
        if index % 3:
            assert answer == READING
        else:
            assert f"image {index // 3}: the image is truncated or damaged" in answer


# Unusual, but good


def on_white(image: Image.Image) -> Image.Image:
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")


def see_through() -> Image.Image:
    image = digits.row(digits.heldout()[0][:2]).convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    row = digits.row(digits.heldout()[0][:3])
    return encoded(row.transpose(Image.Transpose.ROTATE_90), exif=exif)


def grey16(image: Image.Image) -> Image.Image:
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)


def reopened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


ROW = digits.row(digits.heldout()[0][:3])
CMYK = encoded(ROW.convert("CMYK"), "JPEG", quality=95)
PALETTE = encoded(ROW.convert("P", palette=Image.Palette.ADAPTIVE))


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize(
    ("data", "meant"),
    [
        pytest.param(blank(1, 1), lambda: Image.new("RGB", (1, 1)), id="1x1"),
        pytest.param(blank(3, 500), lambda: Image.new("RGB", (3, 500)), id="3x500"),
        pytest.param(PALETTE, lambda: reopened(PALETTE), id="palette"),
        pytest.param(CMYK, lambda: reopened(CMYK), id="CMYK"),
        pytest.param(encoded(grey16(ROW)), lambda: ROW.convert("L").convert("RGB"), id="16 bits"),
        pytest.param(encoded(ROW.convert("1")), lambda: ROW.convert("1").convert("RGB"), id="1 bit"),
        pytest.param(encoded(see_through()), lambda: on_white(see_through()), id="alpha"),
        pytest.param(turned(), lambda: ROW, id="turned by EXIF"),
        pytest.param(
            encoded(ROW, "GIF", save_all=True, append_images=[NOISE.resize(ROW.size)], duration=100),
            lambda: reopened(encoded(ROW, "GIF")),
            id="animated GIF",
        ),
        pytest.param(encoded(ROW, "BMP"), lambda: ROW, id="BMP"),
    ],
)
def test_unusual_images(client: Client, reference: Reference, data: bytes, meant: Callable[[], Image.Image]) -> None:
    content = [{"type": "image", "image": meant()}, {"type": "text", "text": digits.QUESTION}]
    tokens = reference.generate([{"role": "user", "content": content}], 12, ignore_eos=True)
    chunks = client.generate(
        digits.QUESTION, images=[data], sampling={"max_tokens": 12, "ignore_eos": True}, logprobs=True
    )
    assert [int(next(iter(token))) for chunk in chunks for token in chunk.logprobs or ()] == tokens
