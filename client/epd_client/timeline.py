"""What happened to a request and when: as data, as a picture in the terminal, as a trace for Perfetto or Chrome."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

COLOURS = {"queued": "bright_black", "encode": "cyan", "prefill": "yellow", "migrate": "magenta", "decode": "green"}
FIRST_TOKEN = "first token"
ORCHESTRATOR = "orchestrator"  # where spans without an instance are drawn


@dataclass(frozen=True)
class Span:
    """`name` ran from `start` to `end` on `instance`. Times are the server's monotonic clock, in seconds."""

    name: str
    start: float
    end: float
    instance: str = ""
    detail: Mapping[str, int] = field(default_factory=dict)

    @property
    def what(self) -> str:
        """What it was done to: "image 1", "tokens 0-63"."""
        detail = self.detail
        if "item" in detail:
            return f"image {detail['item']}" + (f" unit {detail['unit']}" if detail.get("unit") else "")
        if "first" in detail:
            return f"tokens {detail['first']}-{detail['first'] + detail['tokens'] - 1}"
        return f"{detail['tokens']} tokens" if "tokens" in detail else ""


@dataclass(frozen=True)
class Timeline:
    """One request from its arrival to its end."""

    arrival: float
    end: float
    spans: tuple[Span, ...]
    klass: str = ""  # "sand", "pebble", "rock": what the server took the request for

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Parse what the server sends."""
        data = json.loads(text)
        spans = sorted((Span(**span) for span in data["spans"]), key=lambda span: (span.start, span.end))
        return cls(data["arrival"], data["end"], tuple(spans), data.get("class") or "")

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token, seen from the server."""
        return next((span.end - self.arrival for span in self.spans if span.name == FIRST_TOKEN), None)


def picture(timeline: Timeline, width: int = 100) -> Table:
    """The spans as bars below one another, `width` characters wide; units encoded in one batch share a line."""
    table = Table.grid(padding=(0, 1))
    for justify in ("left", "left", "left", "left", "right"):
        table.add_column(justify=justify, no_wrap=True)
    rows = list(_rows(timeline.spans))
    labels = sum(max(map(len, column)) for column in zip(*(row[:3] for row in rows), strict=True))
    bar_width = max(20, width - labels - 14)  # 14: gaps and the last column
    scale = bar_width / max(timeline.end - timeline.arrival, 1e-6)
    for name, what, instance, start, end in rows:
        first = min(int((start - timeline.arrival) * scale), bar_width - 1)
        last = min(max(int((end - timeline.arrival) * scale), first + 1), bar_width)
        if name == FIRST_TOKEN:
            bar, style, took = "▲", "bold", f"at {_ms(end - timeline.arrival)}"
        else:
            bar, style, took = "█" * (last - first), COLOURS.get(name, "red"), _ms(end - start)
        table.add_row(name, what, instance, Text(" " * first + bar, style), took)
    return table


def overview(timelines: Mapping[str, Timeline], width: int = 100) -> Group:
    """Several requests below one another on one axis, each a line in which every stage has its colour."""
    table = Table.grid(padding=(0, 1))
    bar_width = max(20, width - 2 - max(map(len, timelines), default=0))
    begin = min((timeline.arrival for timeline in timelines.values()), default=0.0)
    scale = bar_width / max(max((timeline.end for timeline in timelines.values()), default=0.0) - begin, 1e-6)
    for name, timeline in timelines.items():
        cells: list[tuple[str, str]] = [(" ", "")] * bar_width
        # Later stages cover earlier ones that they overlap with, and the first token covers all.
        for span in sorted(timeline.spans, key=lambda span: span.name == FIRST_TOKEN):
            first = min(int((span.start - begin) * scale), bar_width - 1)
            last = min(max(int((span.end - begin) * scale), first + 1), bar_width)
            cell = ("▲", "bold") if span.name == FIRST_TOKEN else ("█", COLOURS.get(span.name, "red"))
            cells[first:last] = [cell] * (last - first)
        table.add_row(Text(name, no_wrap=True), Text.assemble(*cells))
    legend = Text("  ").join(Text(f"█ {name}", colour) for name, colour in COLOURS.items())
    return Group(table, legend + Text("  ▲ first token"))


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """The timelines, by request name, in the trace event format that Perfetto and chrome://tracing read.

    A process is an instance, a thread in it is a request; times are microseconds since the first arrival.
    """
    origin = min((timeline.arrival for timeline in timelines.values()), default=0.0)
    order = ["encode", "prefill", "migrate", "decode"]
    stage = {span.instance: span.name for timeline in timelines.values() for span in reversed(timeline.spans)}
    instances = sorted(
        {*stage, ""}, key=lambda name: (name != "", order.index(stage[name]) if stage.get(name) in order else 9, name)
    )
    pids = {instance: index for index, instance in enumerate(instances, 1)}
    events: list[dict[str, Any]] = []
    for instance, pid in pids.items():
        events.append(_metadata("process_name", pid, 0, name=instance or ORCHESTRATOR))
        events.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
        events += (_metadata("thread_name", pid, tid, name=name) for tid, name in enumerate(timelines, 1))
    for tid, timeline in enumerate(timelines.values(), 1):
        whole = Span("request", timeline.arrival, timeline.end)
        for span in (whole, *timeline.spans):
            event = {
                "name": f"{span.name} {span.what}".strip(),
                "cat": span.name,
                "ph": "X",
                "ts": round((span.start - origin) * 1e6, 1),
                "dur": round((span.end - span.start) * 1e6, 1),
                "pid": pids[span.instance],
                "tid": tid,
                "args": dict(span.detail),
            }
            if span.name == FIRST_TOKEN:
                event |= {"ph": "i", "s": "t"}
                del event["dur"]
            events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rows(spans: tuple[Span, ...]) -> Iterator[tuple[str, str, str, float, float]]:
    """(name, what, instance, start, end); spans of one batch, which have the same times, are one row."""
    batches: dict[tuple[str, str, float, float], list[Span]] = {}
    for span in spans:
        batches.setdefault((span.name, span.instance, span.start, span.end), []).append(span)
    for (name, instance, start, end), batch in batches.items():
        what = batch[0].what
        if len(batch) > 1 and "item" in batch[0].detail:
            items = sorted({span.detail["item"] for span in batch})
            what = f"images {items[0]}-{items[-1]}" if len(items) > 1 else f"image {items[0]}, {len(batch)} units"
        yield name, what, instance, start, end


def _metadata(kind: str, pid: int, tid: int, **arguments: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": arguments}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
