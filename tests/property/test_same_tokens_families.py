"""Real workers under the real core, in any schedule: every family's tokens are those of transformers' own generate.

Each example is one deployment (topology, pipeline stages, block sizes, pools barely large enough), one configuration
of the scheduler and one order of events. Plans run on real models; a seeded driver decides when.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import os
import random
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from epd_backend import cpu_attention, weights
from epd_backend.worker import Worker
from epd_orchestrator.checkpoint import Checkpoint
from epd_orchestrator.intake import Intake, Prepared, Query
from epd_scheduler.config import Config, EmbeddingConfig, KVConfig, LimitsConfig, RPSConfig, SchedulerConfig
from epd_scheduler.core import Core
from epd_scheduler.protocol import EncodePlan, Exchange, Outcome, Plan, WorkerInfo, decode_reply, encode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests import checkpoints
from tests.reference import Reference
from tests.simulated import Cluster

LAYERS = 3
PROMPTS = 12
TOKENS = 10

ALL = ("encode", "prefill", "decode")
# (name, roles, device); instances of one device share its arenas
TOPOLOGIES: dict[str, list[tuple[str, tuple[str, ...], str]]] = {
    "E|P|D": [("e", ("encode",), "cpu:0"), ("p", ("prefill",), "cpu:1"), ("d", ("decode",), "cpu:2")],
    "E P D on one device": [("e", ("encode",), "cpu:0"), ("p", ("prefill",), "cpu:0"), ("d", ("decode",), "cpu:0")],
    "2E|PD": [
        ("e1", ("encode",), "cpu:0"),
        ("e2", ("encode",), "cpu:1"),
        ("pd", ("prefill", "decode"), "cpu:2"),
    ],
    "EPD": [("epd", ALL, "cpu:0")],
    "E|2P|2D, one P and one D on one device": [
        ("e", ("encode",), "cpu:0"),
        ("p1", ("prefill",), "cpu:1"),
        ("p2", ("prefill",), "cpu:2"),
        ("d1", ("decode",), "cpu:3"),
        ("d2", ("decode",), "cpu:1"),
    ],
    "E|P|PD": [("e", ("encode",), "cpu:0"), ("p", ("prefill",), "cpu:1"), ("pd", ("prefill", "decode"), "cpu:2")],
}


@dataclass(frozen=True)
class Question:
    """A prompt and what transformers continues it with, end-of-sequence tokens included."""

    query: Query
    answer: list[int]


@dataclass(frozen=True)
class Model:
    """A checkpoint and questions to it."""

    path: str
    eos: tuple[int, ...]
    questions: list[Question] = field(repr=False)


class RealWorker:
    """A worker with the interface of `SimulatedWorker`: runs the plans submitted to it when it is told to."""

    def __init__(self, worker: Worker, media: Mapping[int, bytes], rng: random.Random) -> None:
        self.info = worker.info
        self.submitted: deque[Plan] = deque()
        self.finished: deque[Outcome] = deque()
        self._worker = worker
        self._media = media
        self._rng = rng

    def run_one(self, _now: float) -> None:
        """One plan or several at once, which then overlap in the pipeline; outcomes in the order of the plans."""
        plans = tuple(self.submitted.popleft() for _ in range(self._rng.randint(1, len(self.submitted))))
        handles = {u.media for plan in plans if isinstance(plan, EncodePlan) for u in plan.units}
        joined, where = b"", {}
        for handle in handles:
            where[handle] = (len(joined), len(self._media[handle]))
            joined += self._media[handle]
        exchange, outcomes = Exchange(plans, where, wait_s=30.0), list[Outcome]()
        while len(outcomes) < len(plans):
            reply = decode_reply(self._worker.exchange(encode(exchange), memoryview(joined)))
            assert reply.outcomes, f"no outcome of {plans}"
            outcomes += reply.outcomes
            exchange = Exchange(wait_s=30.0)
        assert [outcome.error for outcome in outcomes] == [None] * len(plans)
        self.finished += sorted(outcomes, key=lambda outcome: outcome.plan)


class RealCluster(Cluster):
    """A core and real workers, driven in random order."""

    def __init__(self, core: Core, workers: Mapping[str, Worker], media: Mapping[int, bytes], seed: int) -> None:
        self._real, self._media = workers, media
        super().__init__(core, [worker.info for worker in workers.values()], random.Random(seed))

    def join(self, info: WorkerInfo) -> None:
        self.workers[info.name] = RealWorker(self._real[info.name], self._media, self.rng)
        self.core.join(info, self.now)


@pytest.fixture(scope="module", autouse=True)
def weights_are_loaded_once() -> Iterator[None]:
    """Of each part of each checkpoint; the workers of an example differ in all else."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "load_part", functools.cache(weights.load_part))
        yield


@pytest.fixture(scope="module", params=checkpoints.FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = checkpoints.make(request.param, tmp_path_factory.mktemp(request.param), layers=LAYERS)
    reference, rng = Reference(path), random.Random(0)
    questions = []
    for _ in range(PROMPTS):
        content = make_content(rng)
        answer = reference.generate([{"role": "user", "content": content}], TOKENS, ignore_eos=True)
        questions.append(Question(make_query(content), answer))
    return Model(str(path), Checkpoint.load(path).eos_token_ids, questions)


PICTURES = [
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, size, np.uint8))
    for seed, size in enumerate([(30, 41, 3), (56, 56, 3), (90, 60, 3), (64, 150, 3), (29, 112, 3)])
]


def make_content(rng: random.Random) -> list[dict[str, Any]]:
    """Text with up to three of a few pictures, so that requests share embeddings."""
    content: list[dict[str, Any]] = [{"type": "text", "text": rng.choice(["What is it?", "Compare.", "a b c d e f g"])}]
    for _ in range(rng.randrange(4)):
        content.insert(rng.randrange(len(content) + 1), {"type": "image", "image": rng.choice(PICTURES)})
    return content


def make_query(content: list[dict[str, Any]]) -> Query:
    images = []
    for part in content:
        if part["type"] == "image":
            file = io.BytesIO()
            part["image"].save(file, "PNG")
            images.append(file.getvalue())
    parts = [{key: value for key, value in part.items() if key != "image"} for part in content]
    return Query(messages=json.dumps([{"role": "user", "content": parts}]), images=tuple(images))


_namespaces = (f"families-{os.getpid()}-{number}" for number in itertools.count())


@contextmanager
def deployed(config: Config, topology: str, stages: Mapping[str, int]) -> Iterator[dict[str, Worker]]:
    """The workers of a topology; `stages` of the instances by role, language instances only."""
    workers: dict[str, Worker] = {}
    namespace = next(_namespaces)
    try:
        for name, roles, device in TOPOLOGIES[topology]:
            depth = max(stages.get(role, 1) for role in roles)
            workers[name] = Worker(config, name=name, roles=roles, device=device, stages=depth, namespace=namespace)  # type: ignore[arg-type]
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


def needed(prepared: list[Prepared], block: int, overlap: str) -> tuple[int, int]:
    """The fewest KV and embedding blocks with which each request could run alone."""
    kv = embedding = 1
    for request in (each.request for each in prepared):
        kv = max(kv, -(-(len(request.tokens) + request.max_tokens) // block))
        units = {(i.key, n): -(-rows // block) for i in request.items for n, rows in enumerate(i.units)}
        needs = units.values()
        embedding = max(embedding, sum(needs) if overlap == "none" else max(needs, default=0))
    return kv, embedding


def ask(model: Model, asked: list[tuple[int, int, bool]]) -> list[Prepared]:
    """Requests for (question, max_tokens, ignore_eos)."""
    intake = Intake(Checkpoint.load(model.path), LimitsConfig())
    made = []
    for seq, (number, most, ignore_eos) in enumerate(asked, 1):
        query = model.questions[number].query
        parameters = json.dumps({"max_tokens": most, "ignore_eos": ignore_eos})
        query = Query(messages=query.messages, images=query.images, sampling_parameters=parameters)
        made.append(intake.prepare(query, seq, float(seq)))
    return made


def expected(model: Model, number: int, most: int, ignore_eos: bool) -> tuple[list[int], str]:
    answer = model.questions[number].answer[:most]
    ends = [index for index, token in enumerate(answer) if token in model.eos and not ignore_eos]
    return (answer[: ends[0]], "stop") if ends else (answer, "length")


@st.composite
def settings_of_scheduler(draw: st.DrawFn) -> SchedulerConfig:
    return SchedulerConfig(
        order=draw(st.sampled_from(["fcfs", "edf", "rps"])),
        rps=RPSConfig(classifier="modality"),
        overlap=draw(st.sampled_from(["none", "intra", "full"])),
        encode_tokens=draw(st.sampled_from([1, 16, 256])),
        token_budget=draw(st.sampled_from([5, 16, 64, 512])),
        max_rows=draw(st.sampled_from([1, 3, 64])),
    )


@settings(
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    asked=st.lists(
        st.tuples(st.integers(0, PROMPTS - 1), st.integers(1, TOKENS), st.booleans()), min_size=1, max_size=7
    ),
    topology=st.sampled_from(sorted(TOPOLOGIES)),
    stages=st.fixed_dictionaries({"prefill": st.integers(1, LAYERS), "decode": st.integers(1, LAYERS)}),
    scheduler=settings_of_scheduler(),
    block=st.sampled_from([1, 4, 16]),
    spare=st.tuples(st.sampled_from([0.0, 0.3, 4.0]), st.sampled_from([0.0, 0.3, 4.0])),
    products=st.sampled_from([{"LEAST": cpu_attention.LEAST}, {"LEAST": 1, "TILE": 7}]),
    seed=st.integers(0, 2**32),
)
def test_any_schedule_gives_the_tokens_of_transformers(
    model: Model,
    asked: list[tuple[int, int, bool]],
    topology: str,
    stages: dict[str, int],
    scheduler: SchedulerConfig,
    block: int,
    spare: tuple[float, float],
    products: dict[str, int],
    seed: int,
) -> None:
    """`products`: short rows too take the attention that on a CPU is for long ones."""
    prepared = ask(model, asked)
    kv, embedding = needed(prepared, block, scheduler.overlap)
    config = Config(
        model=model.path,
        kv=KVConfig(block_size=block, blocks=kv + int(kv * spare[0])),
        embedding=EmbeddingConfig(block_size=block, blocks=embedding + int(embedding * spare[1])),
        scheduler=scheduler,
    )
    with mock.patch.multiple(cpu_attention, **products):
        run(model, asked, prepared, config, topology, stages, seed)


def run(
    model: Model,
    asked: list[tuple[int, int, bool]],
    prepared: list[Prepared],
    config: Config,
    topology: str,
    stages: Mapping[str, int],
    seed: int,
) -> Core:
    """Serve the requests, which arrive one after another at random moments, and check all answers."""
    media = {handle: image for each in prepared for handle, image in each.media.items()}
    with deployed(config, topology, stages) as workers:
        cluster = RealCluster(Core(config, list(workers)), workers, media, seed)
        for each in prepared:
            cluster.add(each.request)
            for _ in range(cluster.rng.randrange(8)):
                cluster.submit()
                cluster.advance()
        cluster.run()
    cluster.assert_empty()
    for seq, question in enumerate(asked, 1):
        answer, reason = expected(model, *question)
        assert (cluster.tokens[seq], cluster.ends[seq].reason) == (answer, reason), f"request {seq}"
    return cluster.core


@pytest.mark.parametrize("topology", ["E|P|D", "EPD"])
def test_preempted_requests_are_computed_again_to_the_same_tokens(model: Model, topology: str) -> None:
    asked = [(number, TOKENS, True) for number in range(PROMPTS)]
    prepared = ask(model, asked)
    kv, embedding = needed(prepared, 4, "full")
    config = Config(
        model=model.path,
        kv=KVConfig(block_size=4, blocks=kv + kv // 2),
        embedding=EmbeddingConfig(block_size=4, blocks=embedding),
    )
    core = run(model, asked, prepared, config, topology, {}, seed=0)
    assert sum(core.stats().preemptions.values()) > 0


def test_the_answers_differ(model: Model) -> None:
    """A test of tokens is worth something only if they depend on the prompt."""
    assert len({tuple(question.answer) for question in model.questions}) > PROMPTS // 2
    assert any(len(set(question.answer)) > 2 for question in model.questions)
