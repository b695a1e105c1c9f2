"""Whole requests through the engine and real workers, in-process: the tokens of transformers' own generate."""

from __future__ import annotations

import io
import json
import random
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from epd_backend.worker import Worker
from epd_orchestrator.checkpoint import Checkpoint
from epd_orchestrator.engine import Engine
from epd_orchestrator.intake import Intake, Query
from epd_orchestrator.session import Update
from epd_scheduler.config import Config, EmbeddingConfig, KVConfig, SchedulerConfig
from PIL import Image

from tests import checkpoints
from tests.reference import Reference

PROMPTS = 8
TOKENS = 12

# name -> (roles, device, stages)
Topology = dict[str, tuple[tuple[str, ...], str, int]]
TOPOLOGIES: dict[str, Topology] = {
    "E|P|D": {
        "encoder": (("encode",), "cpu:0", 1),
        "prefill": (("prefill",), "cpu:1", 1),
        "decode": (("decode",), "cpu:2", 1),
    },
    "E|P|D on one device": {
        "encoder": (("encode",), "cpu:0", 1),
        "prefill": (("prefill",), "cpu:0", 1),
        "decode": (("decode",), "cpu:0", 1),
    },
    "2E|PD": {
        "encoder_1": (("encode",), "cpu:0", 1),
        "encoder_2": (("encode",), "cpu:1", 1),
        "language": (("prefill", "decode"), "cpu:2", 2),
    },
    "EPD": {"all": (("encode", "prefill", "decode"), "cpu:0", 1)},
    "E|2P|2D": {
        "encoder": (("encode",), "cpu:0", 1),
        "prefill_1": (("prefill",), "cpu:1", 2),
        "prefill_2": (("prefill",), "cpu:2", 2),
        "decode_1": (("decode",), "cpu:3", 2),
        "decode_2": (("decode",), "cpu:1", 2),
    },
}


class Client:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end: str = ""
        self.done = threading.Event()

    def send(self, update: Update) -> None:
        self.tokens += [token.token for token in update.tokens]

    def finish(self, update: Update) -> None:
        assert update.end is not None
        self.end = f"{update.end.reason} {update.end.message}".strip()
        self.done.set()

    def cancelled(self) -> bool:
        return False


@contextmanager
def running(config: Config, topology: Topology, namespace: str):
    workers = {
        name: Worker(config, name=name, roles=roles, device=device, stages=stages, namespace=namespace)  # type: ignore[arg-type]
        for name, (roles, device, stages) in topology.items()
    }
    engine = Engine(
        config,
        Intake(Checkpoint.load(config.model), config.limits),
        lambda name, data, media: workers[name].exchange(data, memoryview(media)),
        list(workers),
    )
    try:
        yield engine
    finally:
        engine.close()
        for worker in workers.values():
            worker.close()


def make_prompts(rng: random.Random) -> list[list[dict[str, Any]]]:
    """Chat messages of text and up to four images of any size, anywhere, in transformers' form."""
    prompts = []
    for _ in range(PROMPTS):
        parts: list[dict[str, Any]] = [{"type": "text", "text": rng.choice(["What is it?", "Compare.", "a b c d e f"])}]
        for _ in range(rng.randrange(5)):
            size = (rng.randrange(20, 150), rng.randrange(20, 150), 3)
            pixels = np.random.default_rng(rng.randrange(99)).integers(0, 256, size, np.uint8)
            parts.insert(rng.randrange(len(parts) + 1), {"type": "image", "image": Image.fromarray(pixels)})
        prompts.append([{"role": "user", "content": parts}])
    return prompts


def query(messages: Sequence[dict[str, Any]]) -> Query:
    images, parts = [], []
    for part in messages[0]["content"]:
        if part["type"] == "image":
            file = io.BytesIO()
            part["image"].save(file, "PNG")
            images.append(file.getvalue())
        parts.append({key: value for key, value in part.items() if key != "image"})
    text = json.dumps([{"role": "user", "content": parts}])
    parameters = json.dumps({"max_tokens": TOKENS, "ignore_eos": True})
    return Query(messages=text, images=tuple(images), sampling_parameters=parameters)


@pytest.fixture(scope="module", params=checkpoints.FAMILIES)
def reference(request, tmp_path_factory):
    torch.set_num_threads(1)
    path = checkpoints.make(request.param, tmp_path_factory.mktemp(request.param), layers=2)
    prompts = make_prompts(random.Random(0))
    plain = Reference(path)
    return str(path), prompts, [plain.generate(prompt, TOKENS, ignore_eos=True) for prompt in prompts]


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_topology_and_setting_gives_the_tokens_of_transformers(reference, name: str, seed: int) -> None:
    path, prompts, expected = reference
    rng = random.Random(f"{name} {seed}")
    block = rng.choice([4, 16])
    longest = 700  # tokens of the longest prompt and its output, rounded up
    config = Config(
        model=path,
        kv=KVConfig(block_size=block, blocks=longest // block * rng.choice([1, 2, 8])),  # scarce: preemption
        embedding=EmbeddingConfig(block_size=block, blocks=longest // block * rng.choice([1, 2])),
        scheduler=SchedulerConfig(
            overlap=rng.choice(["none", "intra", "full"]),
            encode_tokens=rng.choice([1, 32, 256]),
            token_budget=rng.choice([7, 64, 512]),
            max_rows=rng.choice([2, 64]),
        ),
    )
    clients = [Client() for _ in prompts]
    with running(config, TOPOLOGIES[name], f"same-tokens-{seed}") as engine:
        for index in rng.sample(range(len(prompts)), len(prompts)):
            engine.submit(query(prompts[index]), clients[index])
            time.sleep(rng.choice([0, 0.01]))
        for client in clients:
            assert client.done.wait(60), "no end"
    assert [client.end for client in clients] == ["length"] * len(clients)
    assert [client.tokens for client in clients] == expected
