"""The bare forward of decode steps: the language model's layers and head, in a process of their own, on one core.

    python -m benchmarks.bare_forward CHECKPOINT --core 1 --sequences 8 --context 50

Prints the mean seconds of a step. No plans, no sampling, no messages: what any server has to spend.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
import torch
from epd_backend.arena import ArenaMap
from epd_backend.executor import LanguageExecutor
from epd_scheduler.config import Config, KVConfig
from epd_scheduler.protocol import BatchPlan, Row

STEPS = 60
BLOCK = 16


def measure(config: Config, sequences: int, context: int) -> float:
    """Mean seconds of a step of `sequences` sequences whose last tokens see `context` tokens."""
    arenas = ArenaMap()
    executor = LanguageExecutor(config, ["cpu:0"], f"bare{os.getpid()}", arenas, embeddings=False)
    (stage,) = executor.stages
    try:
        with torch.inference_mode():
            forward = stage.embed(BatchPlan(1, "", rows(sequences, context)), lambda _: 0)
            stage.logits(stage.advance(forward))  # warm up
            begin = time.perf_counter()
            for _ in range(STEPS):
                stage.logits(stage.advance(forward))
            return (time.perf_counter() - begin) / STEPS
    finally:
        arenas.close()


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
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    torch.set_num_threads(1)
    config = Config(model=args.checkpoint, dtype=args.dtype, kv=KVConfig(block_size=BLOCK, blocks=512))
    print(measure(config, args.sequences, args.context))


if __name__ == "__main__":
    main()
