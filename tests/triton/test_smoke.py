"""Every way in: gRPC streaming, HTTP generate, HTTP generate_stream; text and images; one at a time and together."""

import base64
import io
import json
import os
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from epd_client import control, demo
from epd_client.cli import app
from epd_client.client import Client, EpdError
from epd_client.launch import Server
from epd_client.tensors import encode_image
from PIL import Image
from typer.testing import CliRunner

from models import digits

SCANS, LABELS = digits.heldout()
IMAGES = [digits.render(scan) for scan in SCANS[:6]]
READING = "581234"  # the labels of the first six
GREEDY = {"max_tokens": 16}
TEXT_SAMPLING = {"max_tokens": 12, "min_tokens": 12}


def post(server: Server, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    request = urllib.request.Request(
        f"http://{server.http}/v2/models/epd_ensemble/{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def in_base64(image: Image.Image) -> str:
    return base64.b64encode(encode_image(image)).decode()


def test_the_literals_are_the_labels() -> None:
    assert "".join(map(str, LABELS[:6])) == READING


def test_text(client: Client) -> None:
    answer = client.ask(demo.TEXT_ONLY, sampling=TEXT_SAMPLING)
    assert answer.text == demo.TEXT_ONLY_ANSWER
    assert answer.finish_reason == "length"
    assert answer.num_output_tokens == 12


def test_images_are_streamed_token_by_token(client: Client) -> None:
    chunks = list(client.generate(digits.QUESTION, images=IMAGES, sampling=GREEDY))
    assert "".join(chunk.text for chunk in chunks) == READING
    assert len([chunk for chunk in chunks if chunk.text]) > 1
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "stop"


def test_without_streaming_the_answer_is_one_piece(client: Client) -> None:
    (chunk,) = client.generate(digits.QUESTION, images=IMAGES, sampling=GREEDY, stream=False)
    assert (chunk.text, chunk.finish_reason) == (READING, "stop")


def test_messages_with_data_uris(client: Client) -> None:
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{in_base64(image)}"}} for image in IMAGES
    ]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": digits.QUESTION}]}]
    assert client.ask(messages=messages, sampling=GREEDY).text == READING


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_encodings(client: Client, format: str) -> None:
    buffer = io.BytesIO()
    IMAGES[0].save(buffer, format, quality=95)
    assert client.ask(digits.QUESTION, images=[buffer.getvalue()], sampling=GREEDY).text == READING[0]


def test_http_generate(server: Server) -> None:
    images = [in_base64(image) for image in IMAGES]
    status, body = post(
        server,
        "generate",
        {
            "text_input": digits.QUESTION,
            "image": images,
            "exclude_input_in_output": True,
            "return_finish_reason": True,
            "sampling_parameters": json.dumps(GREEDY),
        },
    )
    answer = json.loads(body)
    assert (status, answer["text_output"], answer["finish_reason"]) == (200, READING, "stop")


def test_http_generate_stream(server: Server) -> None:
    body = {
        "text_input": digits.QUESTION,
        "image": [in_base64(image) for image in IMAGES],
        "stream": True,
        "sampling_parameters": json.dumps(GREEDY),
    }
    status, answer = post(server, "generate_stream", body)
    events = [json.loads(line.removeprefix("data: ")) for line in answer.decode().splitlines() if line]
    assert status == 200
    assert len(events) > 1
    assert "".join(event["text_output"] for event in events) == READING


def test_http_errors_have_a_status_and_a_reason(server: Server) -> None:
    status, body = post(server, "generate", {"text_input": "x", "image": [base64.b64encode(b"no image").decode()]})
    assert status == 400
    assert "image 0" in json.loads(body)["error"]


def test_errors_keep_their_code_over_grpc(client: Client) -> None:
    with pytest.raises(EpdError, match="max_tokens") as error:
        client.ask("hello", sampling={"max_tokens": 0})
    assert error.value.code == "INVALID_ARGUMENT"


def test_many_at_once(client: Client) -> None:
    counts = [int(n) for n in np.random.default_rng(0).integers(1, 7, 16)]
    with ThreadPoolExecutor(len(counts)) as pool:
        ask = lambda n: client.ask(digits.QUESTION, images=IMAGES[:n], sampling=GREEDY).text  # noqa: E731
        assert list(pool.map(ask, counts)) == [READING[:n] for n in counts]


def test_the_timeline_tells_all_stages(client: Client) -> None:
    unseen = Image.frombytes("RGB", (56, 56), os.urandom(56 * 56 * 3))  # its embedding is in no cache
    answer = client.ask(digits.QUESTION, images=[unseen], sampling={"max_tokens": 4, "ignore_eos": True}, timeline=True)
    assert answer.timeline is not None
    spans = answer.timeline.spans
    assert {"encode", "prefill", "migrate", "first token"} <= {span.name for span in spans}
    assert {span.instance for span in spans if span.instance} == {"encoder", "prefill", "decode"}
    assert all(answer.timeline.arrival <= span.start <= span.end <= answer.timeline.end for span in spans)
    prefilled = sorted((span.detail["first"], span.detail["tokens"]) for span in spans if span.name == "prefill")
    ends = [0, *(first + tokens for first, tokens in prefilled)]
    assert [first for first, _ in prefilled] == ends[:-1]  # every token once
    assert ends[-1] == answer.num_input_tokens


def test_cancelled_by_the_client(client: Client) -> None:
    generation = client.generate("1", sampling={"max_tokens": 2000, "ignore_eos": True})
    next(generation)
    generation.cancel()
    assert list(generation) == []  # and the server's pools are empty soon: the fixture sees to that


def test_a_time_limit(client: Client) -> None:
    with pytest.raises(EpdError, match="time limit") as error:
        client.ask("1", sampling={"max_tokens": 2000, "ignore_eos": True}, timeout_s=0.5)
    assert error.value.code == "DEADLINE_EXCEEDED"


def test_health(server: Server) -> None:
    checks = control.health(server.grpc)
    assert all(check.ok for check in checks), checks
    models = {"model encoder", "model prefill", "model decode", "model epd_ensemble"}
    assert models | {"server", "request"} == {check.name for check in checks}
    for stage in ("encode on encoder", "prefill on prefill", "migrate on decode"):
        assert stage in checks[-1].detail


def test_a_reload_of_a_model_that_is_not_there_names_those_that_are(server: Server) -> None:
    with pytest.raises(EpdError, match="no model 'decoder'; it has: decode, encoder, epd_ensemble, prefill"):
        control.reload(server.grpc, "decoder")


def test_the_command_line(server: Server, tmp_path) -> None:
    path = tmp_path / "five.png"
    IMAGES[0].save(path)
    result = CliRunner().invoke(
        app, ["chat", digits.QUESTION, "--image", str(path), "--url", server.grpc, "--timeline"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    assert result.output.startswith(READING[0])
    assert "first token" in result.output
    assert CliRunner().invoke(app, ["health", "--url", server.grpc]).exit_code == 0
