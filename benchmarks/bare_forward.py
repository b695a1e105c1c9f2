"""The bare forward of decode steps: the language model's layers and head, in a process of their own, on one core.

    python -m benchmarks.bare_forward CHECKPOINT --core 1 --context 80

Prints milliseconds by number of sequences as JSON. No plans, no sampling, no messages: what any server has to spend.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import numpy as np
import torch
from epd_backend.arena import ArenaMap
from epd_backend.executor import LanguageExecutor
from epd_scheduler.config import Config, KVConfig
from epd_scheduler.protocol import BatchPlan, Row

STEPS = 40
SEQUENCES = (1, 8)
BLOCK = 16


def measure(config: Config, context: int) -> dict[int, float]:
    """Fastest of many steps, seconds, for each number of sequences whose last tokens see `context` tokens."""
    arenas = ArenaMap()
    executor = LanguageExecutor(config, ["cpu:0"], f"bare{os.getpid()}", arenas, embeddings=False)
    (stage,) = executor.stages
    took = {}
    try:
        with torch.inference_mode():
            for count in SEQUENCES:
                forward = stage.embed(BatchPlan(1, "", rows(count, context)), lambda _: 0)
                times = []
                for _ in range(STEPS):
                    begin = time.perf_counter()
                    stage.logits(stage.advance(forward))
                    times.append(time.perf_counter() - begin)
                took[count] = min(times)
    finally:
        arenas.close()
    return took


def rows(count: int, context: int) -> tuple[Row, ...]:
    blocks = -(-context // BLOCK)
    position = np.full((3, 1), context - 1, np.int32).tobytes()
    return tuple(
        Row(seq, context - 1, (1,), position, tuple(range(seq * blocks, (seq + 1) * blocks)), sample=True)
        for seq in range(count)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Time decode forwards alone.")
    parser.add_argument("checkpoint")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--core", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    torch.set_num_threads(1)
    config = Config(model=args.checkpoint, dtype=args.dtype, kv=KVConfig(block_size=BLOCK, blocks=512))
    print(json.dumps(measure(config, args.context)))


if __name__ == "__main__":
    main()
