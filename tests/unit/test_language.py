"""The workers of a disaggregated server in one process give the tokens of transformers' own `generate`."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from epd_backend import arena
from epd_backend.arena import ArenaMap
from epd_backend.language import LanguageStage
from epd_backend.worker import Worker
from epd_scheduler.config import Config, EmbeddingConfig, KVConfig
from epd_scheduler.protocol import BatchPlan, MigratePlan, SamplerState, Sampling
from PIL import Image
from sklearn.datasets import load_digits

from tests import checkpoints
from tests.reference import Reference
from tests.unit import worker_driver as drive
from tests.unit.worker_driver import Blocks, Prompt

DIGITS = Path(__file__).parents[2] / "models" / "digits-vl"
HELD_OUT = np.random.default_rng(1234).permutation(1797)[:397]
TOKENS = 12


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["digits-vl", *checkpoints.FAMILIES])
def model(request, tmp_path_factory):
    if request.param == "digits-vl":
        return Reference(DIGITS), DIGITS
    path = checkpoints.make(request.param, tmp_path_factory.mktemp(request.param), layers=3)
    return Reference(path), path


def digit(index: int) -> Image.Image:
    pixels = (load_digits().images[index] / 16 * 255).astype(np.uint8)
    return Image.fromarray(pixels).resize((56, 56), Image.Resampling.BICUBIC).convert("RGB")


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def make_prompts(reference: Reference) -> tuple[list[Prompt], list[list[int]], list[bytes]]:
    """Prompts with 3, 1, 0 and 2 images, the tokens that transformers generates for them, the encoded images."""
    rng = random.Random(5)
    prompts, answers, media = [], [], []
    for seq, count in enumerate((3, 1, 0, 2)):
        images = [digit(int(rng.choice(HELD_OUT))) for _ in range(count)]
        content = []
        for image in images:
            content += [{"type": "text", "text": f"{seq} "}, {"type": "image", "image": image}]
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": "Read the digits."}]}]
        inputs = reference.inputs(messages)
        ids = inputs["input_ids"]
        spans = [
            (run[0][0], len(run))
            for placeholder, group in itertools.groupby(
                enumerate(ids[0].tolist()), lambda pair: pair[1] == reference.model.config.image_token_id
            )
            if (run := list(group)) and placeholder
        ]
        assert len(spans) == count
        positions, delta = torch.arange(ids.shape[1])[None], 0
        if hasattr(reference.model.model, "get_rope_index"):
            positions = positions.expand(3, -1)
            if count:
                found, deltas = reference.model.model.get_rope_index(
                    ids, inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
                )
                positions, delta = found[:, 0], int(deltas)
        prompts.append(Prompt(seq, ids[0].tolist(), positions, delta, spans))
        answers.append(reference.generate(messages, TOKENS, ignore_eos=True))
        media += [png(image) for image in images]
    return prompts, answers, media


@contextlib.contextmanager
def workers(path: Path, *described: tuple[str, tuple[str, ...], str, int]):
    config = Config(model=str(path), kv=KVConfig(16, 96), embedding=EmbeddingConfig(4, 64))
    namespace = f"test{os.getpid()}"
    with contextlib.ExitStack() as stack:
        made = []
        for name, roles, device, stages in described:
            made.append(Worker(config, name=name, roles=roles, device=device, stages=stages, namespace=namespace))
            stack.callback(made[-1].close)
        yield made
    assert not [name for name in os.listdir("/dev/shm") if namespace in name]


def prefill(worker: Worker, prompts: list[Prompt], chunk: int, at_once: int) -> list[int]:
    """Prefill staggered prompts in mixed batches of odd chunks, `at_once` plans in flight; the first tokens."""
    plans, done = [], [0] * len(prompts)
    for round_ in itertools.count():
        rows = []
        for i, prompt in enumerate(prompts):
            if round_ >= i and done[i] < len(prompt.tokens):
                end = min(len(prompt.tokens), done[i] + chunk + i)
                rows.append(prompt.chunk(done[i], end))
                done[i] = end
        if not rows:
            break
        plans.append(drive.batch(*rows))
    first: dict[int, int] = {}
    for at in range(0, len(plans), at_once):
        for outcome in drive.run(worker, *plans[at : at + at_once]):
            first |= {sample.seq: sample.token for sample in outcome.samples}
    return [first[prompt.seq] for prompt in prompts]


def decode(
    worker: Worker, prompts: list[Prompt], first: list[int], moves: list[MigratePlan], at_once: int
) -> list[list[int]]:
    """Greedy continuation, several steps in flight: each takes the token that the one before it sampled.

    With `moves`, these go ahead in the same exchange, and the first step opens the sequences.
    """
    output = {prompt.seq: [token] for prompt, token in zip(prompts, first, strict=True)}
    plans: list[BatchPlan | MigratePlan] = [*moves]
    for step in range(1, TOKENS):
        rows = []
        for prompt, token in zip(prompts, first, strict=True):
            opens = bool(moves) and step == 1
            rows.append(prompt.step(step, state=SamplerState(Sampling(), output=(token,)) if opens else None))
        random.Random(step).shuffle(rows)
        plans.append(drive.batch(*rows))
    for at in range(0, len(plans), at_once):
        for outcome in drive.run(worker, *plans[at : at + at_once]):
            for sample in outcome.samples:
                output[sample.seq].append(sample.token)
    return [output[prompt.seq] for prompt in prompts]


@pytest.mark.parametrize(("chunk", "stages"), [(7, 1), (13, 2), (1000, 3)])
def test_disaggregated_tokens_are_those_of_transformers(model, chunk, stages):
    reference, path = model
    prompts, answers, media = make_prompts(reference)
    with workers(
        path,
        ("encoder", ("encode",), "cpu:0", 1),
        ("prefill", ("prefill",), "cpu:1", stages),
        ("decode", ("decode",), "cpu:2", stages),
    ) as (encoder, prefiller, decoder):
        source, target = drive.hello(prefiller), drive.hello(decoder)
        plan = drive.encode_plan(drive.hello(encoder), source.embedding, prompts, Blocks(source.embedding, 1))
        assert drive.run(encoder, plan, media=media)[0].unit_errors == {}
        kv, kv_there = Blocks(source.kv[0], 2), Blocks(target.kv[0], 3)
        for prompt in prompts:
            prompt.blocks = kv.cover(len(prompt.tokens))
        first = prefill(prefiller, prompts, chunk, at_once=stages + 1)
        moves = [drive.migrate(prompt, source, kv_there, TOKENS) for prompt in prompts]
        assert decode(decoder, prompts, first, moves, at_once=len(moves) + stages) == answers


@pytest.mark.parametrize("stages", [1, 3])
def test_an_aggregated_instance_gives_the_same_tokens(model, stages):
    reference, path = model
    prompts, answers, media = make_prompts(reference)
    with workers(path, ("all", ("encode", "prefill", "decode"), "cpu:0", stages)) as (worker,):
        info = drive.hello(worker)
        plan = drive.encode_plan(info, info.embedding, prompts, Blocks(info.embedding, 1))
        kv = Blocks(info.kv[0], 2)
        for prompt in prompts:
            prompt.blocks = kv.cover(len(prompt.tokens) + TOKENS)
        drive.run(worker, plan, media=media)
        first = prefill(worker, prompts, 11, at_once=4)
        assert decode(worker, prompts, first, [], at_once=TOKENS) == answers


def test_prefill_chunks_and_decode_steps_mix_in_one_batch():
    reference = Reference(DIGITS)
    prompts, answers, media = make_prompts(reference)
    early, late = prompts[0], prompts[1]
    with workers(DIGITS, ("all", ("encode", "prefill", "decode"), "cpu:0", 2)) as (worker,):
        info = drive.hello(worker)
        drive.run(worker, drive.encode_plan(info, info.embedding, prompts, Blocks(info.embedding, 1)), media=media)
        kv = Blocks(info.kv[0], 2)
        for prompt in (early, late):
            prompt.blocks = kv.cover(len(prompt.tokens) + TOKENS)
        plans = [drive.batch(early.chunk(0, len(early.tokens)))]
        at = 0
        for step in range(1, TOKENS):  # `late` prefills in chunks of 5 while `early` decodes
            end = min(len(late.tokens), at + 5)
            rows = [early.step(step)] + ([late.chunk(at, end)] if at < end else [])
            at = end
            plans.append(drive.batch(*rows))
        outcomes = drive.run(worker, *plans)
    tokens = [sample.token for outcome in outcomes for sample in outcome.samples if sample.seq == early.seq]
    assert at == len(late.tokens)
    assert tokens == answers[0]
    assert [s.token for o in outcomes for s in o.samples if s.seq == late.seq] == answers[1][:1]


def test_stages_are_bit_equal():
    """Log-probabilities, so all of the arithmetic, do not depend on the number of stages."""
    reference = Reference(DIGITS)
    results = []
    for stages in (1, 2, 3):
        prompts, _, media = make_prompts(reference)
        with workers(DIGITS, ("all", ("encode", "prefill", "decode"), "cpu:0", stages)) as (worker,):
            info = drive.hello(worker)
            plan = drive.encode_plan(info, info.embedding, prompts, Blocks(info.embedding, 1))
            kv = Blocks(info.kv[0], 2)
            for prompt in prompts:
                prompt.blocks = kv.cover(len(prompt.tokens) + TOKENS)
            plans = [drive.batch(*[p.chunk(0, 17) for p in prompts])]
            plans += [drive.batch(*[p.chunk(17, len(p.tokens), Sampling(logprobs=5)) for p in prompts])]
            plans += [drive.batch(*[p.step(step) for p in prompts]) for step in range(1, 4)]
            results.append([outcome.samples for outcome in drive.run(worker, plan, *plans, media=media)])
    assert results[0] == results[1] == results[2]
    assert len(results[0][-1]) == 4
    assert all(len(sample.top) == 5 for sample in results[0][-1])


def test_blocks_are_put_together_from_arenas_of_other_layer_ranges():
    """A GPU instance with stages has an arena a device; one with other stages pulls from all of them."""
    namespace = f"test{os.getpid()}"
    parts = [arena.join(namespace, "cpu:0", "kv", (6, n, 2, 4, 1, 32), torch.float32, at) for at, n in ((0, 1), (1, 3))]
    for part in parts:
        part.tensor.copy_(torch.randn(part.info.shape))
    whole = torch.cat([part.tensor for part in parts], dim=1).clone()
    arenas = ArenaMap()
    plan = MigratePlan(1, "", 1, tuple(part.info for part in parts), (4, 0), (2, 3))
    for first, end in ((0, 2), (2, 4)):
        stage = LanguageStage(DIGITS, torch.float32, "cpu:1", (first, end))
        mine = torch.zeros(5, end - first, 2, 4, 1, 32)
        stage.attach(mine, first, None)
        stage.pull(plan, arenas)
        assert torch.equal(mine[2], whole[4, first:end])
        assert torch.equal(mine[3], whole[0, first:end])
        assert mine[[0, 1, 4]].count_nonzero() == 0
    with pytest.raises(ValueError, match=r"lack decoder layers \[2, 3\]"):
        stage.pull(MigratePlan(1, "", 1, (parts[0].info,), (4,), (2,)), arenas)
    arenas.close()
    for part in parts:
        part.close()
