"""Plans are read off timelines, steps off token times, sizes off config.json: against literals."""

from pathlib import Path

import pytest
from epd_client import profile_builder
from epd_client.load import Observation
from epd_client.payload import TextMaker
from epd_client.profiling import Profiler, Samples, decode_sample
from epd_client.timeline import Span, Timeline
from epd_scheduler.config import Config, EmbeddingConfig, KVConfig, LimitsConfig
from epd_scheduler.fitting import EncodeSample, ForwardSample, MigrateSample
from epd_scheduler.impact import ImpactEstimator
from epd_scheduler.profile import load_profile, save_profile
from epd_scheduler.workload import Kind, Mix, RequestSpec, load_mix

ROOT = Path(__file__).parents[2]
SPEC = RequestSpec(at=0.0, kind="probe", text_tokens=4, output_tokens=2)
SPANS = (
    Span("queued", 0.0, 0.1),
    Span("encode", 0.1, 0.4, "encoder", {"item": 0, "unit": 0, "rows": 64}),  # one plan of two units
    Span("encode", 0.1, 0.4, "encoder", {"item": 1, "unit": 0, "rows": 16}),
    Span("encode", 0.4, 0.5, "encoder", {"item": 2, "unit": 0, "rows": 16}),
    Span("prefill", 0.4, 0.6, "prefill", {"first": 0, "tokens": 80}),
    Span("prefill", 0.6, 0.7, "prefill", {"first": 80, "tokens": 20}),
    Span("first token", 0.7, 0.7),
    Span("migrate", 0.7, 0.75, "decode"),
)


def seen(**fields) -> Observation:
    return Observation(SPEC, timeline=Timeline(0.0, 1.0, SPANS), **fields)


def test_plans_of_a_timeline() -> None:
    samples = Samples()
    samples.add(seen(input_tokens=100), block_size=16)
    assert samples.encode == [
        EncodeSample((16, 64), pytest.approx(0.3)),
        EncodeSample((16,), pytest.approx(0.1)),
    ]
    assert samples.prefill == [
        ForwardSample(((0, 80),), pytest.approx(0.2)),
        ForwardSample(((80, 20),), pytest.approx(0.1)),
    ]
    assert samples.migrate == [MigrateSample(7, pytest.approx(0.05))]


def test_equal_work_is_one_sample_of_the_median_time() -> None:
    samples = Samples(migrate=[MigrateSample(4, t) for t in (0.3, 0.1, 0.2)] + [MigrateSample(5, 9.0)])
    assert samples.medians().migrate == [MigrateSample(4, 0.2), MigrateSample(5, 9.0)]


def test_a_decode_step_is_measured_while_all_decode() -> None:
    """The first sequence decodes alone, faster, until the second joins at 10 s; it ends first, at 20 s."""
    first = [0.1 * step for step in range(100)] + [10.0 + step for step in range(11)]
    second = [10.0 + step for step in range(11)] + [20.1, 20.2]
    sample = decode_sample([seen(tokens=first, input_tokens=50), seen(tokens=second, input_tokens=30)])
    assert sample is not None
    assert sample.seconds == pytest.approx(1.0)
    assert sample.rows == ((35, 1), (155, 1))  # prompt and the tokens up to the middle of the ten steps


def test_sequences_that_hardly_meet_give_no_sample() -> None:
    assert decode_sample([seen(tokens=[0.0, 1.0, 2.0]), seen(tokens=[2.0, 3.0, 4.0])]) is None


def test_probes_fit_the_server() -> None:
    config = Config(
        kv=KVConfig(blocks=64), embedding=EmbeddingConfig(blocks=16), limits=LimitsConfig(context=1024, images=2)
    )
    layout = lambda width, height: (width * height // 784,)  # noqa: E731
    profiler = Profiler("", config, layout, TextMaker(1.0, 0.0))
    images = [spec.images for spec in profiler.encode_probes()]
    assert images[:2] == [((56, 56),), ((112, 112),)]
    assert images[-2:] == [((112, 112),) * 2, ((224, 224),) * 2]
    assert all(sum(width * height // 784 for width, height in group) <= 204 for group in images)
    lengths = [8, 32, 41, 64, 81, 128, 161, 256, 321, 384, 481, 512, 520]
    assert [spec.text_tokens for spec in profiler.prefill_probes()] == lengths
    assert profiler.decode_probes() == [(1, 32), (2, 32), (4, 32), (8, 32), (1, 512)]


def test_bytes_a_token_of_qwen2_5_vl_7b_and_of_digits_vl() -> None:
    qwen = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    assert profile_builder.kv_bytes_token(qwen, "bfloat16") == 57_344
    assert profile_builder.embedding_bytes_row(qwen, "bfloat16") == 7_168
    digits, layout = profile_builder.read_layout(ROOT / "models" / "digits-vl")
    assert profile_builder.kv_bytes_token({"text_config": qwen}, "float32") == 114_688
    assert profile_builder.embedding_bytes_row(digits, "float32") == 4 * digits["text_config"]["hidden_size"]
    assert layout(56, 56) == (4,)


SAMPLES = Samples(  # encoding costs 1 ms a row and a forward 0.1 ms a token
    encode=[EncodeSample((rows,) * count, 1e-3 * rows * count) for rows in (4, 16, 64) for count in (1, 2)],
    prefill=[ForwardSample(((0, tokens),), 1e-4 * tokens) for tokens in (8, 64, 512)],
    decode=[ForwardSample(((99, 1),) * batch, 1e-4 * batch) for batch in (1, 4)],
)


def test_a_profile_is_built_written_and_read_back(tmp_path: Path) -> None:
    """The estimate says what the samples do."""
    model, layout = profile_builder.read_layout(ROOT / "models" / "digits-vl")
    config, mix = Config(model="models/digits-vl"), load_mix(ROOT / "deploy" / "workloads" / "heavy.yaml")
    fits = profile_builder.fit(SAMPLES)
    profile = profile_builder.build(fits, model, config, mix, layout, "a test", apart=True)
    save_profile(profile, tmp_path / "profile.yaml")
    assert load_profile(tmp_path / "profile.yaml") == profile
    assert (profile.model, profile.device) == ("digits-vl", "a test")
    assert [centre.name for centre in profile.centres] == ["sand", "pebble", "rock"]
    impact = ImpactEstimator(profile, config.scheduler).estimate(1000, 24, (64, 64))
    assert impact.prefill_s == pytest.approx(0.128 + 0.1, rel=1e-3)
    assert impact.kv_bytes == 1024 * profile.kv_bytes_token


def test_classes_are_trained_for_the_placement_of_the_server() -> None:
    """16 frames of 64 rows, four to a batch, take 1.024 s to encode. Apart from the encoder, only the last batch's rows
    and the word are left to prefill then; on its device all 1,025 tokens."""
    kinds = (
        Kind(name="text", share=1, text_tokens=(100, 100), output_tokens=(1, 1)),
        Kind(name="image", share=1, text_tokens=(1, 1), output_tokens=(1, 1), images=(1, 1), sizes=((224, 224),)),
        Kind(name="video", share=1, text_tokens=(1, 1), output_tokens=(1, 1), images=(16, 16), sizes=((224, 224),)),
    )
    model, layout = profile_builder.read_layout(ROOT / "models" / "digits-vl")
    fits, mix = profile_builder.fit(SAMPLES), Mix("three kinds", kinds)
    for apart, seconds in ((True, 1.024 + 0.0257), (False, 1.024 + 0.1025)):
        made = profile_builder.build(fits, model, Config(model="x"), mix, layout, "a test", apart=apart)
        assert 10 ** made.centres[2].log_prefill == pytest.approx(seconds, rel=1e-3)
