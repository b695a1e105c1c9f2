"""What `epd bench` prints fits into a terminal of 80 columns, and says which rate is which."""

import re

import pytest
from epd_client import bench
from epd_scheduler.metrics_summary import SLO, RequestResult, summarise
from epd_scheduler.workload import Kind, Mix, generate
from rich.console import Console

SLOS = {kind: SLO(ttft_s=0.5) for kind in ("text", "image", "video")}


def results() -> list[RequestResult]:
    """One of each kind and class, with times of minutes, as under overload."""
    classes = dict(zip(SLOS, ("sand", "pebble", "rock"), strict=True))
    return [
        RequestResult(kind=kind, klass=klass, arrival=0.0, first_token=123.4567, end=223.4567, output_tokens=11)
        for kind, klass in classes.items()
    ]


def test_the_table_fits_into_80_columns() -> None:
    run = bench.Run(
        label="server", workload="heavy", rate=1.5, slos=SLOS, summary=summarise(results(), SLOS), results=results()
    )
    console = Console(width=80)
    with console.capture() as capture:
        console.print(bench.table(run))
    lines = [line.split() for line in capture.get().splitlines()]
    assert " ".join(lines[0]).startswith("server: heavy, 1.50 requests/s sent, 0.01 answered")
    assert lines[1] == ["times", "in", "ms", "text", "image", "video", "sand", "pebble", "rock", "all"]
    assert ["TTFT", "P99", *["123457"] * 7] in lines
    assert ["TPOT", "mean", *["10000"] * 7] in lines
    assert ["e2e/token", *["20314"] * 7] in lines
    assert ["SLO", "met", *["0%"] * 7] in lines
    assert ["missed", "by", *["122957"] * 7] in lines
    assert len(lines) == 16


def test_goodput_says_what_was_asked_for_and_what_was_sent() -> None:
    mix = Mix("small", (Kind(name="text", share=1, text_tokens=(4, 4), output_tokens=(2, 2)),))
    said = bench.find_goodput(lambda specs: float(bench.sent_rate(specs) <= 3), mix, start=1.0, count=20, seed=0)
    asked, sent = map(float, re.findall(r"([\d.]+) requests/s asked for, ([\d.]+) sent", said)[0])
    assert 3 * 0.94 <= sent <= 3
    assert sent == pytest.approx(bench.sent_rate(generate(mix, rate=asked, count=20)), abs=0.02)
    assert abs(asked - sent) > 0.1
    nothing = bench.find_goodput(lambda _specs: 0.0, mix, start=1.0, count=20, seed=0)
    assert nothing.startswith("goodput: 0 requests/s; at no rate")
