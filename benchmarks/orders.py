"""`make bench-orders`: the same load on this host under each order: who waits for whom.

One encoder on a core, one language instance on another, the 118 M checkpoint in bfloat16; 60 % text, 25 % one image,
15 % eight images (deploy/workloads/two-core.yaml), Poisson arrivals. Each order gets a server of its own, one after
the other, and the very same requests at the very same times. A forward takes many times an exchange here, so plans
are not made ahead: whoever arrives waits for the forward that runs alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from epd_client import bench
from epd_client.client import Client
from epd_client.payload import TextMaker
from epd_scheduler.workload import generate, load_mix
from rich.console import Console

from benchmarks.overlap import BUILD, ROOT, checkpoint, server

# The profile-free classifier: by the number of images. Delays in proportion to what these requests take alone.
RPS = "rps: {classifier: modality, pebble_delay: 3.0, rock_delay: 10.0, share: 0.1}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the orders fcfs, edf and rps on this host.")
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second")
    parser.add_argument("--count", type=int, default=100, help="requests an order")
    parser.add_argument("--budget", type=int, default=128, help="scheduler.token_budget")
    parser.add_argument("--orders", nargs="+", default=["fcfs", "edf", "rps"])
    parser.add_argument("--out", type=Path, default=BUILD / "orders.json")
    args = parser.parse_args()
    mix = load_mix(ROOT / "deploy" / "workloads" / "two-core.yaml")
    specs = generate(mix, rate=args.rate, count=args.count, seed=1)
    console, runs = Console(), []
    for order in args.orders:
        scheduler = f"order: {order}, token_budget: {args.budget}, async_scheduling: false, {RPS}"
        with server(checkpoint("bfloat16"), "bfloat16", scheduler) as running:
            with Client(running.grpc) as client:
                text = TextMaker.calibrate(client)
            run = bench.measure(
                running.grpc, specs, text, label=order, workload=mix.name, slos=mix.slos, timeout_s=600.0
            )
        runs.append(run)
        console.print(bench.table(run))
    args.out.parent.mkdir(exist_ok=True)
    bench.save(runs, args.out)


if __name__ == "__main__":
    main()
