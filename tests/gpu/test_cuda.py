"""The CUDA paths: arenas over IPC between processes, attention kernels, all stages on one GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import uuid

import pytest
import torch
from epd_backend import arena
from epd_backend.arena import ArenaMap
from epd_backend.attention import PagedKV, Ragged, attend
from epd_scheduler.protocol import Row

from tests.unit import test_language as language
from tests.unit import worker_driver as drive
from tests.unit.worker_driver import Blocks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch")

DEVICE = "cuda:0"
OTHER_PROCESS = """
import sys
import torch
from epd_backend import arena
theirs = arena.join(sys.argv[1], "cuda:0", "embedding", (4, 2, 8), torch.bfloat16)
assert theirs.info.id == sys.argv[2]
assert theirs.tensor[1].eq(3.0).all()
theirs.tensor[2] = 5.0
theirs.close()
"""


@pytest.fixture
def namespace():
    name = f"test{uuid.uuid4().hex[:8]}"
    yield name
    assert not [entry for entry in os.listdir("/dev/shm") if name in entry]


def test_two_processes_share_an_arena(namespace):
    mine = arena.join(namespace, DEVICE, "embedding", (4, 2, 8), torch.bfloat16)
    assert mine.tensor.count_nonzero() == 0
    mine.tensor[1] = 3.0
    torch.cuda.synchronize()
    command = [sys.executable, "-c", OTHER_PROCESS, namespace, mine.info.id]
    subprocess.run(command, check=True, timeout=120)
    assert mine.tensor[2].eq(5.0).all()
    mine.close()


def test_users_in_one_process_share_the_memory_and_the_last_frees_it(namespace):
    before = torch.cuda.mem_get_info()[0]
    mine = arena.join(namespace, DEVICE, "embedding", (64, 1024, 1024), torch.float32)
    arenas = ArenaMap()
    assert arenas.open(mine.info).data_ptr() == mine.tensor.data_ptr()
    assert torch.cuda.mem_get_info()[0] <= before - 2**28
    mine.close()
    arenas.close()
    assert torch.cuda.mem_get_info()[0] > before - 2**28


@pytest.mark.parametrize("kernels", ["sdpa", "flashinfer"])
def test_attention_is_that_of_the_cpu(kernels):
    if kernels == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed")
    block, heads, kv_heads, dim, dtype = 16, 8, 2, 64, torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    filled = torch.randn(32, 2, 2, block, kv_heads, dim, generator=generator).to(dtype)
    rows = [Row(0, 0, (), b"", (3, 9)), Row(1, 40, (), b"", (5, 1, 7)), Row(2, 33, (), b"", (30, 2, 11, 8))]
    rows.append(Row(3, 20, (), b"", (12, 4)))  # attends at once with row 1, which is not beside it
    lengths = [20, 1, 17, 1]
    query, key, value = (
        torch.randn(1, count, sum(lengths), dim, generator=generator).to(dtype) for count in (heads, kv_heads, kv_heads)
    )
    results = []
    for device in ("cpu", DEVICE):
        paged = PagedKV(filled.clone().to(device), 0)
        if device == DEVICE and kernels == "sdpa":
            paged.kernels = None
        ragged = Ragged.of(rows, lengths, block)
        module = torch.nn.Module()
        module.layer_idx = 1
        inputs = (x.to(device) for x in (query, key, value))
        out, _ = attend(module, *inputs, None, kv=paged.bind(ragged), scaling=dim**-0.5)
        results.append(out.float().cpu())
    torch.testing.assert_close(results[1], results[0], rtol=2e-2, atol=2e-2)


def test_all_stages_on_one_gpu_give_the_tokens_of_transformers():
    """The instances share the device's arenas, so the blocks of both come from one pool."""
    reference = language.Reference(language.DIGITS)
    prompts, answers, media = language.make_prompts(reference)
    with language.workers(
        language.DIGITS,
        ("encoder", ("encode",), DEVICE, 1),
        ("prefill", ("prefill",), DEVICE, 1),
        ("decode", ("decode",), DEVICE, 1),
    ) as (encoder, prefiller, decoder):
        source = drive.hello(prefiller)
        assert drive.hello(decoder).kv == source.kv
        plan = drive.encode_plan(drive.hello(encoder), source.embedding, prompts, Blocks(source.embedding, 1))
        drive.run(encoder, plan, media=media)
        kv = Blocks(source.kv[0], 2)
        for prompt in prompts:
            prompt.blocks = kv.cover(len(prompt.tokens))
        first = language.prefill(prefiller, prompts, 13, at_once=2)
        moves = [drive.migrate(prompt, source, kv, language.TOKENS) for prompt in prompts]
        assert language.decode(decoder, prompts, first, moves, at_once=len(moves) + 1) == answers
