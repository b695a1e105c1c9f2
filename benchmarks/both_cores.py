"""`python -m benchmarks.both_cores`: one aggregated instance with two threads for every operation, on cores 0 and 1.

What a server that does not separate the stages does with two cores: the comparison for numbers of such servers.
Prints the time to first token of requests with 1 to 8 images, and the time between tokens of one text answer; the
fastest of the repetitions, as in `benchmarks/overlap.py`.
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np
from epd_client.client import Client

from benchmarks.overlap import OVERLAPS, QUESTION, Bench, checkpoint, host, token_times
from benchmarks.servers import configuration, serve


def inter_token(client: Client) -> float:
    """Mean seconds between the tokens of one answer."""
    times = token_times(client, QUESTION)
    return float(np.mean([b - a for a, b in itertools.pairwise(times)]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to first token with both cores for every operation.")
    parser.add_argument("--images", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--overlap", choices=OVERLAPS, default="full")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--wait", type=float, default=60.0, help="most seconds to wait for an idle machine, each time")
    args = parser.parse_args()
    model = checkpoint(args.dtype)
    bench = Bench(model, args.wait)
    config = configuration(model, args.dtype, f"overlap: {args.overlap}")
    ttft: dict[int, list[float]] = {count: [] for count in args.images}
    between: list[float] = []
    with serve(config, "1EPD", cores={"aggregated": "0,1"}, threads=2) as running, Client(running.grpc) as client:
        bench.ttft(client, args.overlap, 2)  # warm up
        for _ in range(args.repetitions):
            for count, seen in ttft.items():
                seen.append(bench.ttft(client, args.overlap, count).ttft)
            between.append(inter_token(client))
    print(f"{host()}, {args.dtype}, overlap {args.overlap}, fastest (median) of {args.repetitions}, ms")
    for count, seen in ttft.items():
        print(f"{count} images: {1e3 * min(seen):.0f} ({1e3 * float(np.median(seen)):.0f})")
    print(f"between tokens: {1e3 * min(between):.1f} ({1e3 * float(np.median(between)):.1f})")


if __name__ == "__main__":
    main()
