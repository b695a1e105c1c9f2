"""The three worker models on a real Triton server, driven by hand: separate processes that share arenas."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc
from epd_client.launch import Server
from epd_scheduler.protocol import SamplerState, Sampling
from tritonclient.utils import InferenceServerException

from tests.reference import Reference
from tests.unit import worker_driver as drive
from tests.unit.test_language import DIGITS, TOKENS, make_prompts, prefill
from tests.unit.worker_driver import Blocks

ROOT = Path(__file__).parents[2]
WORKERS = ("encoder", "prefill", "decode")


class Remote:
    """A worker model with the interface of `Worker`."""

    def __init__(self, url: str, model: str) -> None:
        self._client = grpc.InferenceServerClient(url)
        self._model = model

    def exchange(self, data: bytes, media: memoryview) -> bytes:
        inputs = []
        for name, value in (("PLANS", data), ("MEDIA", media)):
            inputs.append(grpc.InferInput(name, [len(value)], "UINT8"))
            inputs[-1].set_data_from_numpy(np.frombuffer(value, np.uint8))
        result = self._client.infer(self._model, inputs, client_timeout=60)
        return result.as_numpy("OUTCOMES").tobytes()


@pytest.fixture(scope="module")
def workers():
    with Server(ROOT / "model_repository", config_name="cpu", models=WORKERS, env={"EPD_MODEL": str(DIGITS)}) as server:
        namespace = f"epd_{server.pid}_"
        yield [Remote(server.grpc, name) for name in WORKERS]
        assert [name for name in os.listdir("/dev/shm") if name.startswith(namespace)]
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(namespace)]


def test_three_processes_give_the_tokens_of_transformers(workers):
    encoder, prefiller, decoder = workers
    prompts, answers, media = make_prompts(Reference(DIGITS))
    infos = [drive.hello(worker) for worker in workers]
    assert [info.roles for info in infos] == [("encode",), ("prefill",), ("decode",)]
    assert [info.device for info in infos] == ["cpu:0", "cpu:1", "cpu:2"]
    assert len({info.pid for info in infos}) == 3
    source, target = infos[1], infos[2]
    plan = drive.encode_plan(infos[0], source.embedding, prompts, Blocks(source.embedding, 1))
    assert drive.run(encoder, plan, media=media)[0].unit_errors == {}
    kv = Blocks(source.kv[0], 2)
    for prompt in prompts:
        prompt.blocks = kv.cover(len(prompt.tokens))
    first = prefill(prefiller, prompts, 13, at_once=2)
    there = Blocks(target.kv[0], 3)
    drive.run(decoder, *[drive.migrate(prompt, source, there, TOKENS) for prompt in prompts])
    states = [SamplerState(Sampling(), output=(token,)) for token in first]
    steps = [drive.batch(*[p.step(1, (), state) for p, state in zip(prompts, states, strict=True)])]
    steps += [drive.batch(*[p.step(step) for p in prompts]) for step in range(2, TOKENS)]
    outcomes = drive.run(decoder, *steps)
    output = [[token, *(o.samples[i].token for o in outcomes)] for i, token in enumerate(first)]
    assert output == answers


def test_what_is_no_exchange_is_an_error_of_the_call_alone(workers):
    with pytest.raises(InferenceServerException, match="ValidationError"):
        workers[2].exchange(b"\x01", memoryview(b""))
    assert drive.hello(workers[2]).name == "decode"
