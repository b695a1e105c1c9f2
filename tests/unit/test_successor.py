"""An orchestrator that is loaded again, on real workers one of which still runs a plan of its predecessor.

The plan writes to blocks that the new orchestrator believes free, at the worst moment: after a plan of the new one has
written them and before another reads them.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from epd_backend.worker import Worker
from epd_orchestrator.checkpoint import Checkpoint
from epd_orchestrator.engine import Engine
from epd_orchestrator.intake import Intake, Query
from epd_scheduler.config import Config, EmbeddingConfig, KVConfig, SchedulerConfig
from epd_scheduler.protocol import BatchPlan, EncodePlan, EncodeUnit, Exchange, Plan, Row, decode_exchange, encode

from models import digits
from tests.unit import worker_driver as drive
from tests.unit.test_same_tokens import Client

BLOCKS = 8
CONFIG = Config(
    model=str(digits.CHECKPOINT),
    kv=KVConfig(16, BLOCKS),
    embedding=EmbeddingConfig(4, BLOCKS),
    # One plan at a time, two for the prompt, both after the encoding.
    scheduler=SchedulerConfig(overlap="none", token_budget=32, async_scheduling=False),
)
PLACES = {  # name -> (role, device)
    "encoder": ("encode", "cpu:0"),
    "encoder_1": ("encode", "cpu:1"),
    "prefill": ("prefill", "cpu:2"),
    "decode": ("decode", "cpu:2"),
    "decode_1": ("decode", "cpu:3"),
}
SCANS, LABELS = digits.heldout()
LEFT_S = 1.0  # so long does the plan that is left behind take, if the worst moment does not come


def png(scan: digits.Scan) -> bytes:
    file = io.BytesIO()
    digits.render(scan).save(file, "PNG")
    return file.getvalue()


def encoding(prefill: Worker) -> Plan:
    """An image, into each block of the embedding arena."""
    arena = prefill.info.embedding
    assert arena is not None
    return EncodePlan(drive.plan_id(), "", arena, tuple(EncodeUnit(1, i, 0, 0, 4, (i,)) for i in range(BLOCKS)))


def forward(_: Worker) -> Plan:
    """Tokens, into each block of the KV arena."""
    count = 16 * BLOCKS
    positions = np.arange(count, dtype=np.int32)[None].repeat(3, 0)
    return drive.batch(Row(1, 0, (5,) * count, positions.tobytes(), tuple(range(BLOCKS))))


@pytest.mark.parametrize(
    ("busy", "left_behind", "worst"),
    [("encoder", encoding, 1), ("decode", forward, 2)],
    ids=["an encoder", "decode on the device of prefill"],
)
def test_no_instance_joins_while_another_runs_a_plan_of_the_predecessor(
    monkeypatch: pytest.MonkeyPatch, busy: str, left_behind: Callable[[Worker], Plan], worst: int
) -> None:
    """`worst`: the batch of prefill that reads what the plan would overwrite."""
    workers = {
        name: Worker(CONFIG, name=name, roles=(role,), device=device, namespace=f"test{os.getpid()}s")  # type: ignore[arg-type]
        for name, (role, device) in PLACES.items()
    }
    for pid, worker in enumerate(workers.values()):
        worker.info = msgspec.structs.replace(worker.info, pid=pid)
    pids = {name: {worker.info.pid} for name, worker in workers.items()}
    monkeypatch.setattr("epd_orchestrator.process.older", lambda _: pids)
    monkeypatch.setattr("epd_orchestrator.process.runs", lambda _: True)
    go, done = threading.Event(), threading.Event()
    stage = workers[busy]._pipeline._stages[0]

    def slow(job: Any) -> None:
        go.wait(LEFT_S)
        stage(job)
        done.set()

    monkeypatch.setattr(workers[busy]._pipeline, "_stages", [slow])
    batches = 0

    def exchange(name: str, data: bytes, media: bytes) -> bytes:
        nonlocal batches
        if name == "prefill":
            batches += sum(isinstance(plan, BatchPlan) for plan in decode_exchange(data).plans)
            if batches == worst:
                go.set()
                assert done.wait(60), "the plan that was left behind does not end"
        return workers[name].exchange(data, memoryview(media))

    other, mine = (png(SCANS[list(LABELS).index(label)]) for label in (4, 7))
    plans = encode(Exchange((left_behind(workers["prefill"]),), media={0: (0, len(other))}))
    workers[busy].exchange(plans, memoryview(other))
    checkpoint = Checkpoint.load(CONFIG.model)
    engine = Engine(CONFIG, Intake(checkpoint, CONFIG.limits), exchange, list(workers))
    client = Client()
    engine.submit(Query(digits.QUESTION, images=(mine,), sampling_parameters='{"max_tokens": 4}'), client)
    assert client.done.wait(60), "no end"
    engine.close()
    for worker in workers.values():
        worker.close()
    assert (client.end, checkpoint.tokenizer.decode(client.tokens)) == ("stop", "7")
