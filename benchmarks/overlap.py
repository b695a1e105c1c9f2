"""`make bench-overlap`: time to first token of requests with 1 to 16 images, with and without overlap.

Two real servers of the same two instances, an encoder on one core and a language instance on another, differ in
`scheduler.overlap` alone. They are asked in turn, so that both see the same machine. Every image is sent once: an
embedding that is in the cache already would cost nothing. The fastest of the repetitions counts, since whatever else
runs on a host only adds time.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from epd_client.client import Client
from epd_client.launch import Server
from epd_client.payload import noise_jpeg
from epd_orchestrator.checkpoint import Checkpoint
from epd_orchestrator.intake import Intake, Query
from epd_scheduler.config import LimitsConfig

from benchmarks import floor, make_bench_checkpoint, overlap_report, quiet
from benchmarks.servers import ROOT, configuration, serve

BUILD = ROOT / "build"
SIZE = 448  # pixels: 256 tokens
QUESTION = "What is in the pictures?"
OVERLAPS = ("none", "full")
CORES = {"encoder": "0", "language": "1"}
DECODING = 8  # sequences
OUTPUT = 64  # tokens of each


@dataclass(frozen=True)
class Run:
    """One request."""

    overlap: str
    images: int
    ttft: float  # from sending to the first token, seen from the client
    server_ttft: float  # from arrival to the first token, from the timeline
    idle: float  # of the machine just before
    stages: floor.Stages


def checkpoint(dtype: str) -> Path:
    """The benchmark checkpoint, made once."""
    path = BUILD / f"bench-vl-{dtype}"
    if not (path / "config.json").is_file():
        make_bench_checkpoint.make(path, getattr(torch, dtype))
    return path


def server(model: Path, dtype: str, scheduler: str) -> contextlib.AbstractContextManager[Server]:
    """A server whose two instances have a core each; `scheduler` is YAML, as in deploy/epd.yaml."""
    return serve(configuration(model, dtype, scheduler), "1E1PD", cores=CORES)


class Bench:
    """Asks and measures; `wait_s` is the most that it waits for a quiet machine before each request."""

    def __init__(self, model: Path, wait_s: float) -> None:
        self._intake = Intake(Checkpoint.load(model), LimitsConfig(context=8192))
        self._random = np.random.default_rng(0)
        self._wait_s = wait_s

    def ttft(self, client: Client, overlap: str, count: int) -> Run:
        """One request with `count` images that no server has seen."""
        images = [noise_jpeg(SIZE, SIZE, self._random) for _ in range(count)]
        request = self._intake.prepare(Query(text=QUESTION, images=tuple(images)), 0, 0.0).request
        idle = quiet.wait(self._wait_s)
        begin = time.monotonic()
        chunks = client.generate(QUESTION, images=images, sampling={"max_tokens": 1, "ignore_eos": True}, timeline=True)
        first, *_, last = [(time.monotonic(), chunk) for chunk in chunks]
        line = last[1].timeline
        stages = floor.stages(line, [item.start for item in request.items])
        return Run(overlap, count, first[0] - begin, line.ttft_s, idle, stages)

    def decode_step(self, client: Client) -> float:
        """Seconds between tokens while `DECODING` sequences decode together, on average."""
        quiet.wait(self._wait_s)
        prompts = [f"{QUESTION} {index}" for index in range(DECODING)]
        with ThreadPoolExecutor(DECODING) as pool:
            times = list(pool.map(lambda prompt: token_times(client, prompt), prompts))
        begin, end = max(one[0] for one in times), min(one[-1] for one in times)  # all decode
        gaps = [b - a for one in times for a, b in itertools.pairwise(one) if begin <= a and b <= end]
        return float(np.mean(gaps))


def token_times(client: Client, prompt: str) -> list[float]:
    """When each token of a text answer came."""
    times: list[float] = []
    for chunk in client.generate(prompt, sampling={"max_tokens": OUTPUT, "ignore_eos": True}):
        times += [time.monotonic()] * chunk.num_output_tokens
    return times


def bare_forward(model: Path, dtype: str, wait_s: float) -> float:
    """Mean seconds of a decode step's forward alone, at the contexts that `Bench.decode_step` has on average."""
    command = [sys.executable, "-m", "benchmarks.bare_forward", str(model), "--dtype", dtype]
    command += ["--core", CORES["language"], "--sequences", str(DECODING), "--context", str(20 + OUTPUT // 2)]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    quiet.wait(wait_s)
    return float(subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def host() -> str:
    """What the numbers were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}, torch {torch.__version__}"


def best(runs: Sequence[Run], overlap: str, images: int) -> Run:
    """The fastest repetition."""
    return min((r for r in runs if (r.overlap, r.images) == (overlap, images)), key=lambda r: r.ttft)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what overlapping encoding and prefill saves.")
    parser.add_argument("--images", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--wait", type=float, default=60.0, help="most seconds to wait for an idle machine, each time")
    parser.add_argument("--out", type=Path, default=BUILD / "overlap.json")
    args = parser.parse_args()
    os.sched_setaffinity(0, {int(CORES["encoder"])})  # server and clients too: the language core decodes alone
    model = checkpoint(args.dtype)
    bench = Bench(model, args.wait)
    runs, steps, forwards = list[Run](), list[float](), list[float]()
    with contextlib.ExitStack() as stack:
        clients = {}
        for overlap in OVERLAPS:
            running = stack.enter_context(server(model, args.dtype, f"overlap: {overlap}"))
            clients[overlap] = stack.enter_context(Client(running.grpc))
            bench.ttft(clients[overlap], overlap, 2)  # warm up
        for repetition in range(args.repetitions):
            for images in args.images:
                for overlap in OVERLAPS:
                    runs.append(bench.ttft(clients[overlap], overlap, images))
                    print(f"{repetition} {overlap} {images}: {runs[-1].ttft:.3f} s", flush=True)
            steps.append(bench.decode_step(clients["full"]))
            forwards.append(bare_forward(model, args.dtype, args.wait))
    result = {
        "host": host(),
        "dtype": args.dtype,
        "repetitions": args.repetitions,
        "best": [asdict(best(runs, overlap, n)) for n in args.images for overlap in OVERLAPS],
        "decode_steps": steps,
        "bare_forwards": forwards,
        "decode_step": min(steps),
        "bare_forward": min(forwards),
        "runs": [asdict(run) for run in runs],
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1))
    overlap_report.show(result)
    overlap_report.draw(result, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
