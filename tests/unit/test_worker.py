"""The exchange: plans in, outcomes out, faults as outcomes, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from epd_backend.arena import ArenaError
from epd_backend.doorbell import ring
from epd_backend.instance import config_path, open_worker
from epd_backend.worker import Worker
from epd_scheduler.config import Config, ConfigError, EmbeddingConfig, KVConfig
from epd_scheduler.protocol import (
    EmbedSpan,
    EncodePlan,
    EncodeUnit,
    Exchange,
    MigratePlan,
    Row,
    SamplerState,
    Sampling,
    decode_reply,
    encode,
)

from tests.unit import worker_driver as drive

DIGITS = Path(__file__).parents[2] / "models" / "digits-vl"
CONFIG = Config(model=str(DIGITS), kv=KVConfig(16, 8), embedding=EmbeddingConfig(4, 8))
NAMESPACE = f"test{os.getpid()}w"


def worker(*roles, stages=1, name="worker", device="cpu:0"):
    return Worker(CONFIG, name=name, roles=roles, device=device, stages=stages, namespace=NAMESPACE)


@pytest.fixture(params=[1, 2], ids=["one stage", "two stages"])
def language(request):
    made = worker("prefill", "decode", stages=request.param)
    yield made
    made.close()
    assert not [name for name in os.listdir("/dev/shm") if NAMESPACE in name]


def row(seq=1, tokens=(5, 6, 7), start=0, blocks=(0,), **more) -> Row:
    count = len(tokens) or 1
    positions = np.arange(start, start + count, dtype=np.int32)[None].repeat(3, 0)
    return Row(seq, start, tuple(tokens), positions.tobytes(), blocks, **more)


def test_hello_says_what_the_instance_is(language):
    info = drive.hello(language)
    assert (info.name, info.roles, info.device, info.pid) == ("worker", ("prefill", "decode"), "cpu:0", os.getpid())
    assert [arena.shape for arena in info.kv] == [(8, 4, 2, 16, 1, 32)]  # one: stages share the CPU's
    assert info.embedding.shape == (8, 4, 160)
    assert info.kv[0].dtype == info.embedding.dtype == "float32"


def test_roles_decide_what_is_held():
    encoder, decoder, both = worker("encode"), worker("decode"), worker("encode", "decode")
    infos = [drive.hello(one) for one in (encoder, decoder, both)]
    assert [bool(info.kv) for info in infos] == [False, True, True]
    assert [info.embedding for info in infos] == [None, None, None]
    assert infos[0].weight_bytes + infos[1].weight_bytes == infos[2].weight_bytes
    assert infos[1].kv == infos[2].kv  # the device's, shared
    for one in (encoder, decoder, both):
        one.close()


def test_an_exchange_without_work_returns_at_once(language):
    start = time.monotonic()
    assert decode_reply(language.exchange(encode(Exchange(wait_s=5.0)), memoryview(b""))).outcomes == ()
    assert time.monotonic() - start < 4.0


def test_an_exchange_waits_for_a_first_outcome_no_longer_than_asked(language):
    plan = drive.batch(row())
    reply = decode_reply(language.exchange(encode(Exchange((plan,), wait_s=5.0)), memoryview(b"")))
    outcome = reply.outcomes[0]
    assert (outcome.plan, outcome.error, outcome.samples) == (plan.id, None, ())
    assert 0 < outcome.end - outcome.start < 5.0
    assert abs(time.monotonic() - outcome.end) < 5.0  # the same clock


@pytest.mark.parametrize("same", [True, False], ids=["this process", "its predecessor"])
def test_plans_for_another_process_are_not_taken(language, same):
    exchange = Exchange((drive.batch(row()),), wait_s=5.0, pid=language.info.pid if same else language.info.pid + 1)
    reply = decode_reply(language.exchange(encode(exchange), memoryview(b"")))
    assert (len(reply.outcomes), reply.pending) == (int(same), 0)


@pytest.mark.parametrize("early", [True, False], ids=["while the call is on its way", "while it waits"])
def test_a_ring_ends_the_wait(language, early):
    language._in_progress += 1  # a plan that takes for ever
    if early:
        ring(language.info.bell)
    else:
        threading.Timer(0.1, ring, [language.info.bell]).start()
    begin = time.monotonic()
    reply = decode_reply(language.exchange(encode(Exchange(wait_s=60.0)), memoryview(b"")))
    language._in_progress -= 1
    assert (reply.outcomes, reply.pending) == ((), 1)
    assert time.monotonic() - begin < 30.0


def test_a_reply_counts_the_plans_without_an_outcome(language):
    wanted = 3
    reply = decode_reply(
        language.exchange(encode(Exchange(tuple(drive.batch(row()) for _ in range(wanted)))), memoryview(b""))
    )
    while wanted := wanted - len(reply.outcomes):
        assert reply.pending == wanted
        reply = decode_reply(language.exchange(encode(Exchange(wait_s=5.0)), memoryview(b"")))
        assert reply.outcomes, "no outcome within five seconds"
    assert reply.pending == 0


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        (drive.batch(row(sample=True)), "sequences [1] were not opened on this instance"),
        (drive.batch(row(tokens=())), "no token was sampled here for sequence 1"),
        (drive.batch(row(tokens=(10**6,))), "IndexError"),
        (drive.batch(row(blocks=())), "the row of sequence 1 has 0 blocks for 3 tokens"),
        (drive.batch(row(blocks=(99,))), "out of bounds"),
        (drive.batch(row(embeds=(EmbedSpan(0, 2, 0, (99,)),))), "IndexError"),
        (MigratePlan(drive.plan_id(), "", 1, (), (0,), (1,)), "lack decoder layers"),
        (EncodePlan(drive.plan_id(), "", drive.NO_ARENA, ()), "has roles prefill, decode only"),
        (
            EncodePlan(drive.plan_id(), "", drive.NO_ARENA, (EncodeUnit(1, 0, 0, 77, 4, (0,)),)),
            "names media [77] that its exchange does not carry",
        ),
        (
            MigratePlan(drive.plan_id(), "", 1, (drive.NO_ARENA,), (0,), (1,)),
            "is gone",
        ),
    ],
)
def test_a_plan_that_fails_is_an_outcome_and_harms_no_other(language, plan, error):
    good = drive.batch(row(seq=2, sample=True, open=SamplerState(Sampling())))
    following = drive.batch(row(seq=2, tokens=(), start=3, sample=True))
    outcomes = drive.run_any(language, good, plan, following)
    assert error in outcomes[1].error
    assert outcomes[1].samples == ()
    assert [outcomes[0].error, outcomes[2].error] == [None, None]
    assert [len(outcome.samples) for outcome in outcomes] == [1, 0, 1]


def test_close_drops_the_sampler_state_before_the_rows_run(language):
    opened = drive.batch(row(sample=True, open=SamplerState(Sampling())))
    closed = drive.batch(row(seq=2, tokens=(9,), blocks=(1,)), close=(1,))
    late = drive.batch(row(tokens=(4,), start=3, sample=True))
    reopened = drive.batch(row(tokens=(4,), start=3, sample=True, open=SamplerState(Sampling())), close=(1,))
    outcomes = drive.run_any(language, opened, closed, late, reopened)
    assert [outcome.error is None for outcome in outcomes] == [True, True, False, True]


def test_a_failed_plan_and_a_migration_close_too(language):
    info = drive.hello(language)
    state = SamplerState(Sampling())
    opened = drive.batch(row(seq=1, sample=True, open=state), row(seq=2, blocks=(1,), sample=True, open=state))
    failing = drive.batch(row(seq=9, blocks=()), close=(1,))
    moved = MigratePlan(drive.plan_id(), "", 9, info.kv, (0,), (5,), close=(2,))
    one, two = (drive.batch(row(seq=seq, tokens=(4,), start=3, sample=True)) for seq in (1, 2))
    outcomes = drive.run_any(language, opened, failing, moved, one, two)
    assert "sequences [1]" in outcomes[3].error
    assert "sequences [2]" in outcomes[4].error


def test_media_are_copied_before_the_exchange_returns():
    encoder, language = worker("encode"), worker("prefill", device="cpu:1")
    arena = drive.hello(language).embedding
    plan = EncodePlan(drive.plan_id(), "", arena, (EncodeUnit(1, 0, 0, 0, 4, (0,)),))
    buffer = bytearray(b"not an image")
    encoder.exchange(encode(Exchange((plan,), media={0: (0, len(buffer))})), memoryview(buffer))
    buffer.clear()  # BufferError if the worker still held it
    reply = decode_reply(encoder.exchange(encode(Exchange(wait_s=5.0)), memoryview(b"")))
    assert list(reply.outcomes[0].unit_errors) == [0]
    encoder.close()
    language.close()


def test_what_is_no_exchange_is_refused(language):
    with pytest.raises(msgspec.ValidationError):
        language.exchange(b"\x01", memoryview(b""))


def test_close_finishes_plans_wakes_waiters_and_stops_threads():
    before = set(threading.enumerate())
    made = worker("decode", stages=2)
    plans = tuple(drive.batch(row()) for _ in range(3))
    made.exchange(encode(Exchange(plans)), memoryview(b""))
    made.close()
    made.close()
    assert set(threading.enumerate()) == before
    reply = decode_reply(made.exchange(encode(Exchange(wait_s=5.0)), memoryview(b"")))
    assert [outcome.plan for outcome in reply.outcomes] == [plan.id for plan in plans]
    with pytest.raises(RuntimeError, match="worker is closed"):
        made.exchange(encode(Exchange((drive.batch(row()),))), memoryview(b""))


@pytest.mark.parametrize(("stages", "error"), [(0, "at least one"), (5, "5 pipeline stages for 4 decoder layers")])
def test_impossible_stages_are_refused(stages, error):
    with pytest.raises(ValueError, match=error):
        worker("decode", stages=stages)


def test_a_failed_start_leaves_nothing():
    with pytest.raises(ArenaError, match=r"lower `kv\.blocks`"):
        Worker(
            msgspec.structs.replace(CONFIG, kv=KVConfig(16, 2**40)),
            name="big",
            roles=("prefill",),
            device="cpu:0",
            namespace=NAMESPACE,
        )
    assert not [name for name in os.listdir("/dev/shm") if NAMESPACE in name]


def triton_args(directory: Path, **parameters: str) -> dict[str, str]:
    described = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    return {
        "model_config": msgspec.json.encode(described).decode(),
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
        "model_name": directory.name,
        "model_repository": str(directory),
    }


def test_an_instance_opens_from_what_triton_says():
    root = DIGITS.parents[1]
    made = open_worker(triton_args(root / "model_repository" / "decode", roles="decode", device="cpu:2", stages="2"))
    info = drive.hello(made)
    assert (info.name, info.roles, info.device, info.stages) == ("decode", ("decode",), "cpu:2", 2)
    made.close()


def test_an_instance_stays_on_its_cores(monkeypatch):
    """And its threads may wait awake there."""
    everything = os.sched_getaffinity(0)
    core = max(everything)
    directory = DIGITS.parents[1] / "model_repository" / "decode"
    try:
        monkeypatch.setenv("GOMP_SPINCOUNT", "")  # so that it is put back
        monkeypatch.delenv("GOMP_SPINCOUNT")
        made = open_worker(triton_args(directory, roles="decode", device="cpu:2", cpus=str(core)))
        threads = [os.sched_getaffinity(t.native_id) for t in threading.enumerate() if t.name.startswith("decode-")]
        made.close()
    finally:
        os.sched_setaffinity(0, everything)
    assert threads == [{core}]
    assert int(os.environ["GOMP_SPINCOUNT"]) > 0
    for wrong in ("0,x", "9999"):
        with pytest.raises(ConfigError, match="name cores that this process may use"):
            open_worker(triton_args(directory, roles="decode", cpus=wrong))


GROWTH = """
import resource
from epd_backend.instance import open_worker
made = open_worker({args!r})
import torch
from torch import nn
from epd_backend import cpu
layers = nn.ModuleList(nn.Linear(128, size) for size in (64, 128, 192))
cpu.speed_up(layers)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
with torch.inference_mode():
    before = resident()
    for rows in range(33, 513, 2):
        x = torch.ones(rows, 128)
        for layer in layers:
            layer(x)
    print(resident() - before)
made.close()
"""


def test_an_instance_keeps_no_code_for_every_number_of_rows():
    args = triton_args(DIGITS.parents[1] / "model_repository" / "encoder", roles="encode")
    defaults = {"LRU_CACHE_CAPACITY": "1024", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024"}
    clean = {key: value for key, value in os.environ.items() if key not in defaults}
    kept, grown = (
        int(subprocess.check_output([sys.executable, "-c", GROWTH.format(args=args)], env=env))
        for env in (clean, clean | defaults)
    )
    assert kept < grown / 2


@pytest.mark.parametrize("roles", ["", "decoder", "prefill decode"])
def test_wrong_roles_are_refused(roles):
    with pytest.raises(ConfigError, match="name one or several of encode, prefill, decode"):
        open_worker(triton_args(DIGITS.parents[1] / "model_repository" / "decode", roles=roles))


def test_the_configuration_is_beside_the_repository(tmp_path, monkeypatch):
    monkeypatch.delenv("EPD_CONFIG", raising=False)
    model = tmp_path / "repository" / "decode"
    model.mkdir(parents=True)
    with pytest.raises(ConfigError, match="set EPD_CONFIG"):
        config_path(str(model))
    link = tmp_path / "elsewhere" / "decode_1"
    link.parent.mkdir()
    link.symlink_to(model)
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "epd.yaml").touch()
    assert config_path(str(model)) == config_path(str(link)) == tmp_path / "deploy" / "epd.yaml"
    monkeypatch.setenv("EPD_CONFIG", "/other.yaml")
    assert config_path(str(model)) == Path("/other.yaml")
