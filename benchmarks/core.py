"""`make bench-core`: what one scheduling iteration of the core costs, by number of waiting requests and order.

An iteration is what the orchestrator does for one outcome: `complete`, `step`, `drain`. The workload is mixed (60 %
text, 25 % one image, 15 % eight images) and always in the middle of its work: half of the requests wait for memory.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from epd_scheduler.config import Config, EmbeddingConfig, KVConfig, RPSConfig, SchedulerConfig
from epd_scheduler.core import Core
from epd_scheduler.protocol import ArenaInfo, BatchPlan, EncodePlan, Outcome, Plan, Sample, Sampling, WorkerInfo
from epd_scheduler.request import Item, Request

KV_BLOCKS = 4096


def workers() -> list[WorkerInfo]:
    kv = (ArenaInfo("kv", "kv", "cpu:1", "", (KV_BLOCKS, 1, 2, 16, 1, 1), "float32"),)
    embedding = ArenaInfo("embedding", "embedding", "cpu:1", "", (1024, 16, 1), "float32")
    return [
        WorkerInfo("encoder", ("encode",), "cpu:0", 1),
        WorkerInfo("language", ("prefill", "decode"), "cpu:1", 1, kv, embedding),
    ]


def request(seq: int, rng: np.random.Generator) -> Request:
    images = int(rng.choice([0, 1, 8], p=[0.6, 0.25, 0.15]))
    items = tuple(Item(f"{seq}/{i}", seq * 8 + i, 8 + 256 * i, (256,)) for i in range(images))
    length = 66 + 256 * images
    positions = np.arange(length, dtype=np.int32)[None]
    return Request(seq, (7,) * length, positions, 0, items, Sampling(), 32, arrival=seq * 1e-3)


def finish(plan: Plan, now: float) -> Outcome:
    samples = tuple(Sample(row.seq, 1) for row in plan.rows if row.sample) if isinstance(plan, BatchPlan) else ()
    return Outcome(plan.id, now, now, samples)


def iterations(order: str, waiting: int, count: int) -> list[float]:
    """Microseconds of `count` iterations with about `waiting` requests queued."""
    scheduler = SchedulerConfig(order=order, rps=RPSConfig(classifier="modality"))  # type: ignore[arg-type]
    config = Config(kv=KVConfig(blocks=KV_BLOCKS), embedding=EmbeddingConfig(blocks=1024), scheduler=scheduler)
    infos = workers()
    core = Core(config, [info.name for info in infos])
    for info in infos:
        core.join(info, 0.0)
    rng = np.random.default_rng(0)
    seq, now, took = 0, 0.0, []
    in_flight: list[Plan] = []
    for step in range(count + 50):
        while len(core.order) < waiting:
            seq += 1
            core.add(request(seq, rng), now)
        now += 0.01
        outcome = finish(in_flight.pop(0), now) if in_flight else None
        begin = time.perf_counter()
        if outcome:
            core.complete(outcome, now)
        plans = core.step(now)
        core.drain()
        if step >= 50:
            took.append((time.perf_counter() - begin) * 1e6)
        in_flight += sorted(plans, key=lambda plan: isinstance(plan, EncodePlan))
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="iterations a cell")
    count = parser.parse_args().count
    print(f"{'order':>6} {'waiting':>8} {'mean us':>9} {'median us':>10} {'P99 us':>9}")
    for order in ("fcfs", "edf", "rps"):
        for waiting in (10, 100, 1_000, 10_000):
            took = iterations(order, waiting, count)
            p99 = statistics.quantiles(took, n=100)[98]
            print(
                f"{order:>6} {waiting:>8} {statistics.fmean(took):>9.0f} {statistics.median(took):>10.0f} {p99:>9.0f}"
            )


if __name__ == "__main__":
    main()
