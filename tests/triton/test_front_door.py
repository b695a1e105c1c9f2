"""The inputs and outputs of `epd_ensemble` as Triton carries them: vLLM's habits, and what is refused."""

import json
import queue
from typing import Any

import numpy as np
import pytest
from epd_client.client import Client, EpdError
from epd_client.launch import Server
from tritonclient.grpc import InferenceServerClient, InferInput

from models import digits
from tests.triton.test_smoke import GREEDY, IMAGES, READING, in_base64, post

FLAGS = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens", "timeline")
PAD = "<|image_pad|>"


def generate(server: Server, **body: Any) -> dict[str, Any]:
    status, answer = post(server, "generate", body)
    assert status == 200, answer
    return dict(json.loads(answer))


def test_all_outputs_of_one_response(server: Server) -> None:
    got = generate(
        server,
        text_input=digits.QUESTION,
        image=[in_base64(IMAGES[0])],
        sampling_parameters=json.dumps(GREEDY),
        **{f"return_{name}": True for name in FLAGS},
    )
    assert got["text_output"] == digits.QUESTION + READING[0]  # the prompt is repeated unless excluded
    assert (got["finish_reason"], got["num_output_tokens"]) == ("stop", 1)
    assert got["num_input_tokens"] > 4
    (token,) = json.loads(got["logprobs"])
    (value,) = token.values()
    assert value["decoded_token"] == READING[0]
    assert value["logprob"] == pytest.approx(got["cumulative_logprob"])
    assert value["logprob"] < 0
    assert json.loads(got["timeline"])["spans"]


def test_outputs_that_were_not_asked_for_do_not_come(server: Server) -> None:
    got = generate(server, text_input="1", sampling_parameters='{"max_tokens": 1}')
    assert set(got) == {"model_name", "model_version", "text_output"}


def test_parameters_of_the_request_are_sampling_parameters(server: Server) -> None:
    parameters = {"max_tokens": 3, "ignore_eos": True, "temperature": "0"}
    got = generate(server, text_input="1", parameters=parameters, return_num_output_tokens=True)
    assert got["num_output_tokens"] == 3
    status, body = post(server, "generate", {"text_input": "1", "parameters": {"max_token": 3}})
    assert (status, "did you mean 'max_tokens'?" in body.decode()) == (400, True)


def test_one_image_need_not_be_a_list(server: Server) -> None:
    got = generate(server, text_input=digits.QUESTION, image=in_base64(IMAGES[1]), exclude_input_in_output=True)
    assert got["text_output"] == READING[1]


def test_request_id_and_priority_are_carried(server: Server) -> None:
    inputs = [InferInput("text_input", [1], "BYTES"), InferInput("priority", [1], "INT32")]
    inputs.append(InferInput("return_timeline", [1], "BOOL"))
    for tensor, value in zip(
        inputs, (np.array([b"1"], object), np.array([2], np.int32), np.array([True])), strict=True
    ):
        tensor.set_data_from_numpy(value)
    results: queue.Queue[Any] = queue.Queue()
    with InferenceServerClient(server.grpc) as stub:
        stub.start_stream(lambda result, error: results.put((result, error)), stream_timeout=90)
        stub.async_stream_infer("epd_ensemble", inputs, request_id="id-7")
        result, error = results.get(timeout=30)
        stub.stop_stream()
    assert error is None
    timeline = json.loads(result.as_numpy("timeline")[0])
    assert (result.get_response().id, timeline["id"], timeline["priority"]) == ("id-7", "id-7", 2)


def test_a_stream_cannot_repeat_the_prompt(server: Server) -> None:
    body = {"text_input": "1", "stream": True, "exclude_input_in_output": False}
    status, answer = post(server, "generate_stream", body)
    assert "exclude_input_in_output" in answer.decode()
    assert status == 400


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"text": f"{PAD}{PAD}", "images": [IMAGES[0]]}, "has 2 placeholders"),
        ({"text": ""}, "'text_input' is empty"),
        ({"text": "1", "images": [b""]}, "the image is empty"),
        ({"text": "1", "images": [b"no base64!"]}, "neither an encoded image nor valid base64"),
        ({"text": "1" * 5000}, "the prompt has 5000 tokens, the context is 4096"),
        ({"text": "1", "sampling": {"max_tokens": 4096}}, "the limit is 2048"),
        ({"text": "1", "sampling": {"temperature": -1}}, "'temperature' must be at least 0"),
        ({"messages": [{"role": "user", "content": PAD}]}, "contains the image placeholder"),
    ],
)
def test_a_refusal_harms_no_neighbour(client: Client, query: dict[str, Any], message: str) -> None:
    neighbour = client.generate(digits.QUESTION, images=IMAGES, sampling=GREEDY)
    with pytest.raises(EpdError, match=message) as error:
        client.ask(**query)
    assert error.value.code == "INVALID_ARGUMENT"
    assert "".join(chunk.text for chunk in neighbour) == READING
