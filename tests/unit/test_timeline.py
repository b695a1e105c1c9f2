import json

from epd_client.timeline import Span, Timeline, chrome_trace, overview, picture
from rich.console import Console, RenderableType

SPANS = [
    {"name": "prefill", "start": 10.05, "end": 10.06, "instance": "prefill", "detail": {"first": 0, "tokens": 64}},
    {"name": "encode", "start": 10.0, "end": 10.05, "instance": "encoder", "detail": {"item": 0, "unit": 0, "rows": 4}},
    {"name": "encode", "start": 10.0, "end": 10.05, "instance": "encoder", "detail": {"item": 1, "unit": 0, "rows": 4}},
    {"name": "first token", "start": 10.07, "end": 10.07},
    {"name": "decode", "start": 10.07, "end": 10.1, "detail": {"tokens": 3}},
]
TIMELINE = Timeline.from_json(json.dumps({"id": "", "priority": 0, "arrival": 10.0, "end": 10.1, "spans": SPANS}))


def lines(drawing: RenderableType) -> list[str]:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(drawing)
    return capture.get().splitlines()


def test_spans_are_ordered_by_their_start() -> None:
    assert [span.name for span in TIMELINE.spans] == ["encode", "encode", "prefill", "first token", "decode"]


def test_ttft_counts_from_arrival() -> None:
    assert TIMELINE.ttft_s is not None
    assert abs(TIMELINE.ttft_s - 0.07) < 1e-9
    assert Timeline(0.0, 1.0, ()).ttft_s is None


def test_picture_has_a_line_a_batch_and_bars_in_proportion() -> None:
    encode, prefill, first_token, decode = lines(picture(TIMELINE))
    assert encode.startswith("encode")
    assert "images 0-1" in encode
    assert "50.0 ms" in encode
    assert "tokens 0-63" in prefill
    assert "at 70.0 ms" in first_token
    assert "3 tokens" in decode
    assert encode.count("█") > 4 * prefill.count("█") > 0
    assert encode.index("█") + encode.count("█") <= prefill.index("█") + 1
    assert prefill.index("█") < first_token.index("▲") <= decode.index("█")


def test_picture_of_a_request_without_spans() -> None:
    assert lines(picture(Timeline(1.0, 1.0, ()))) in ([], [""])


def test_overview_puts_requests_on_one_axis() -> None:
    late = Timeline(10.1, 10.2, (Span("encode", 10.1, 10.2, "encoder", {"item": 0}),))
    first, second, legend = lines(overview({"first": TIMELINE, "second": late}))
    assert first.startswith("first")
    assert first.index("█") < second.index("█")
    assert "first token" in legend


def test_chrome_trace_has_a_process_an_instance_and_a_thread_a_request() -> None:
    trace = chrome_trace({"one": TIMELINE, "two": TIMELINE})
    events = trace["traceEvents"]
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert list(processes) == ["orchestrator", "encoder", "prefill"]  # in the order of the stages
    encode = [event for event in events if event.get("cat") == "encode"]
    assert [event["tid"] for event in encode] == [1, 1, 2, 2]
    assert {event["pid"] for event in encode} == {processes["encoder"]}
    assert encode[0]["name"] == "encode image 0"
    assert encode[0]["ts"] == 0
    assert encode[0]["dur"] == 50_000
    first_token = next(event for event in events if event["name"] == "first token")
    assert first_token["ph"] == "i"
    assert first_token["ts"] == 70_000
    json.dumps(trace)
