"""Many requests at once, over all protocols: each has its own answer, as if it were alone."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from epd_client import demo
from epd_client.client import Client
from epd_client.launch import Server
from epd_client.tensors import encode_image
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from models import digits
from tests.reference import Reference
from tests.triton.load import IMAGES, READING, Load, reading
from tests.triton.test_smoke import in_base64, post

ROOT = Path(__file__).parents[2]
CHANCE = {"temperature": 8.0, "top_p": 0.95, "max_tokens": 24, "ignore_eos": True}


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def test_the_mix_of_the_demo_twice_at_once(client: Client) -> None:
    cases = demo.Cases(ROOT).twelve() * 2
    answers = at_once([lambda case=case: client.ask(**case.arguments, timeline=True) for case in cases])
    assert [answer.text for answer in answers] == [case.right for case in cases]
    for case, answer in zip(cases, answers, strict=True):
        assert answer.num_output_tokens == len(case.right)  # a token a digit
        spans = answer.timeline.spans
        prefilled = sum(span.detail["tokens"] for span in spans if span.name == "prefill")
        assert prefilled == answer.num_input_tokens


def test_all_protocols_at_once(server: Server, client: Client) -> None:
    def body(count: int, stream: bool) -> dict[str, Any]:
        images = [in_base64(image) for image in IMAGES[:count]]
        exclude = {"exclude_input_in_output": True, "stream": stream}
        return {"text_input": digits.QUESTION, "image": images, "sampling_parameters": '{"max_tokens": 16}'} | exclude

    def grpc(count: int) -> str:
        return client.ask(**reading(count)).text

    def generate(count: int) -> str:
        status, answer = post(server, "generate", body(count, stream=False))
        assert status == 200, answer
        return str(json.loads(answer)["text_output"])

    def generate_stream(count: int) -> str:
        status, answer = post(server, "generate_stream", body(count, stream=True))
        assert status == 200, answer
        return "".join(
            json.loads(line.removeprefix("data: "))["text_output"] for line in answer.decode().splitlines() if line
        )

    calls = [(ask, count) for count in range(1, 7) for ask in (grpc, generate, generate_stream)]
    answers = at_once([lambda ask=ask, count=count: ask(count) for ask, count in calls])
    assert answers == [READING[:count] for _, count in calls]


def test_unary_calls_are_refused_with_the_reason(server: Server) -> None:
    text = triton.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"1"], object))
    with triton.InferenceServerClient(server.grpc) as unary, pytest.raises(InferenceServerException) as caught:
        unary.infer("epd_ensemble", [text], client_timeout=60)
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
    assert "doesn't support models with decoupled transaction policy" in caught.value.message()
    status, answer = post(
        server, "infer", {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["1"]}]}
    )
    assert (status, "decoupled" in answer.decode()) == (501, True)


def test_many_requests_on_one_stream_are_told_apart_by_id(server: Server) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(server.grpc) as stream:
        stream.start_stream(lambda result, error: answers.put(error or result), stream_timeout=90)
        for number in range(16):
            tensors = {
                "text_input": np.array([digits.QUESTION], object),
                "image": np.array([encode_image(image) for image in IMAGES[: number % 6 + 1]], object),
                "priority": np.array([number % 4], np.int32),
                "exclude_input_in_output": np.array([True]),
                "return_timeline": np.array([True]),
            }
            inputs = []
            for name, value in tensors.items():
                inputs.append(triton.InferInput(name, [len(value)], np_to_triton_dtype(value.dtype)))
                inputs[-1].set_data_from_numpy(value)
            stream.async_stream_infer("epd_ensemble", inputs, request_id=f"request {number}")
        results = [answers.get(timeout=60) for _ in range(16)]
        stream.stop_stream()
    for result in results:
        timeline, number = json.loads(result.as_numpy("timeline")[0]), int(result.get_response().id.split()[1])
        assert (timeline["id"], timeline["priority"]) == (f"request {number}", number % 4)
        assert result.as_numpy("text_output")[0].decode() == READING[: number % 6 + 1]
    assert len({result.get_response().id for result in results}) == 16


def test_a_seed_gives_the_same_output_alone_and_in_a_busy_batch(server: Server, client: Client) -> None:
    def ask(seed: int) -> str:
        return client.ask(**reading(2) | {"sampling": CHANCE | {"seed": seed}}).text

    alone = [ask(seed) for seed in range(8)]
    assert len(set(alone)) > 4
    with Load(server.grpc, users=6) as load:
        load.wait_for(6)
        busy = at_once([lambda seed=seed: ask(seed) for seed in range(8)])
        load.wait_for(12)
    assert busy == alone
    assert all(result.right for result in load.results)  # chance in a batch does not touch greedy neighbours


def test_without_a_seed_outputs_differ(client: Client) -> None:
    assert len({client.ask(**reading(2) | {"sampling": CHANCE}).text for _ in range(4)}) > 1


def pieces(client: Client, sampling: Mapping[str, Any]) -> tuple[list[str], str | None]:
    no_end = {"max_tokens": 12, "logit_bias": {"256": -100, "257": -100}}  # end-of-sequence tokens of digits-vl
    chunks = list(client.generate(demo.TEXT_ONLY, sampling=no_end | sampling))
    return [chunk.text for chunk in chunks if chunk.text], chunks[-1].finish_reason


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        # The whole answer is 126119281144, one token a character.
        (["19"], "1261", "stop"),
        (["1192", "9"], "12611", "stop"),
        ("8", "1261192", "stop"),
        (["1145", "44x"], "126119281144", "length"),  # begin, but never come
        (["126"], "", "stop"),
    ],
)
def test_stop_strings_never_leak(server: Server, client: Client, stop: Any, text: str, reason: str) -> None:
    assert demo.TEXT_ONLY_ANSWER == "126119281144"
    with Load(server.grpc, users=3) as load:
        load.wait_for(1)
        results = at_once([lambda: pieces(client, {"stop": stop})] * 4)
    for streamed, why in results:
        assert ("".join(streamed), why) == (text, reason)


def test_logprobs_are_those_of_transformers(server: Server, client: Client) -> None:
    torch.set_num_threads(1)
    reference = Reference(digits.CHECKPOINT)
    content = [*({"type": "image", "image": image} for image in IMAGES), {"type": "text", "text": digits.QUESTION}]
    inputs = reference.inputs([{"role": "user", "content": content}])
    out = reference.model.generate(
        **inputs, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    right = torch.stack(out.logits)[:, 0].log_softmax(-1)
    with Load(server.grpc, users=3) as load:
        load.wait_for(1)
        sampling = {"max_tokens": 6, "logprobs": 3}
        chunks = list(client.generate(digits.QUESTION, images=IMAGES, sampling=sampling, logprobs=True))
    tokens = [token for chunk in chunks for token in chunk.logprobs or ()]
    assert len(tokens) == 6
    for values, row, digit in zip(tokens, right, READING, strict=True):
        top = row.topk(3)
        assert [int(key) for key in values] == top.indices.tolist()
        assert [value["rank"] for value in values.values()] == [1, 2, 3]
        assert [value["logprob"] for value in values.values()] == pytest.approx(top.values.tolist(), abs=1e-3)
        assert next(iter(values.values()))["decoded_token"] == digit
    assert chunks[-1].cumulative_logprob == pytest.approx(right.max(-1).values.sum().item(), abs=1e-3)
