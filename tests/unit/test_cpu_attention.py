"""The attention of CPUs against a plain one in double precision, and where it is used."""

import json

import numpy as np
import pytest
import torch
from epd_backend import cpu, cpu_attention, weights
from epd_backend.cpu_language import DecoderLayer
from epd_backend.cpu_vision import WindowedAttention
from epd_backend.language import LanguageStage
from epd_scheduler.protocol import BatchPlan, Row
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from tests import checkpoints

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")


def plain(query, key, value, scaling, causal):
    group, (n, m) = len(query) // len(key), (query.shape[1], key.shape[1])
    key, value = (x.double().repeat_interleave(group, 0) for x in (key, value))
    scores = query.double() @ key.transpose(1, 2) * scaling
    if causal:
        scores.masked_fill_(torch.ones(n, m, dtype=torch.bool).triu(m - n + 1), float("-inf"))
    return (scores.softmax(-1) @ value).transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (70, 70), (256, 256), (257, 600), (300, 812), (64, 1000)])
def test_attention(dtype, causal, heads, kv_heads, queries, keys):
    generator = torch.Generator().manual_seed(queries)
    query, key, value = (
        torch.randn(tokens, count, 24, generator=generator).to(dtype).transpose(0, 1)
        for tokens, count in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    )
    got = cpu_attention.attention(query, key, value, 0.3, causal=causal)
    assert (got.shape, got.dtype) == ((queries, heads, 24), dtype)
    exact = plain(query, key, value, 0.3, causal)
    tolerance = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps  # of the result's rounding alone
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


def test_heads_compute_one_by_one_where_their_scores_together_are_large(monkeypatch):
    product, made = cpu.product, []
    monkeypatch.setattr(cpu, "product", lambda *args: made.append(product(*args)) or made[-1])
    query, key = torch.randn(64, 6, 8).transpose(0, 1), torch.randn(40_000, 1, 8).transpose(0, 1)
    got = cpu_attention.attention(query, key, key, 0.3, causal=True)
    torch.testing.assert_close(got.double(), plain(query, key, key, 0.3, True), rtol=1e-5, atol=1e-5)
    assert max(scores.nbytes for scores in made) < 32 * 2**20


def test_rotate():
    query, angle = torch.randn(1, 3, 5, 16), torch.randn(1, 5, 8)
    cos, sin = (torch.cat([x, x], -1) for x in (angle.cos(), angle.sin()))
    expected, _ = apply_rotary_pos_emb(query, query, cos, sin)
    torch.testing.assert_close(cpu_attention.rotate(query, cos, sin), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_the_modules_of_all_families_use_it(tmp_path, family):
    """A change of transformers' names would otherwise just make the server slower."""
    path = checkpoints.make(family, tmp_path)
    stage = LanguageStage(path, torch.float32, "cpu:0", (0, 2))
    assert len([m for m in stage.model.modules() if isinstance(m, DecoderLayer)]) == 2
    tower = weights.load_part(path, "vision", torch.float32, torch.device("cpu")).model
    if family.startswith("qwen"):
        assert any(isinstance(module, WindowedAttention) for module in tower.modules())
    else:
        assert tower.vision_tower.config._attn_implementation == cpu_attention.NAME


@pytest.mark.parametrize("sampled", [(), (2,), (0, 2)])
def test_the_last_layer_computes_sampled_tokens_alone(tmp_path, sampled):
    """Of the others their keys and values, without which what follows would be wrong."""
    stage = LanguageStage(checkpoints.make("qwen2_5_vl", tmp_path), torch.float32, "cpu:0", (0, 2))
    config = json.loads((tmp_path / "config.json").read_text())["text_config"]
    kv_heads, dim = config["num_key_value_heads"], config["hidden_size"] // config["num_attention_heads"]
    lengths, seen = (5, 1, 9), []
    stage._text.layers[-1].layer.mlp.act_fn.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))

    def run(sample):
        kv = torch.zeros(3, 2, 2, 16, kv_heads, dim)
        stage.attach(kv, 0, None)
        rows = [
            Row(i, 0, tuple(range(n)), np.arange(n, dtype=np.int32)[None].repeat(3, 0).tobytes(), (i,), (), i in sample)
            for i, n in enumerate(lengths)
        ]
        with torch.inference_mode():
            return stage.logits(stage.advance(stage.embed(BatchPlan(1, "", tuple(rows)), lambda _: 0))), kv

    logits, kv = run(sampled)
    assert seen == ([len(sampled)] if sampled else [])
    everything, kv_of_all = run((0, 1, 2))
    torch.testing.assert_close(logits, everything[list(sampled)], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kv, kv_of_all, rtol=1e-5, atol=1e-5)
    assert all(kv[i, 1, :, n - 1].count_nonzero() for i, n in enumerate(lengths))
