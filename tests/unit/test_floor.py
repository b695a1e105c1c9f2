"""The benchmark's floor: literals worked out by hand."""

import pytest
from epd_client.timeline import Span, Timeline

from benchmarks import floor


def span(name, start, end, **detail):
    return Span(name, start, end, "instance", detail)


def test_floor_of_a_pipeline():
    """Encoding 3 + 3, prefill 1 (text), 2, 2: the last chunk can begin at 6 at the earliest, so 8 is the floor."""
    line = Timeline(
        arrival=10.0,
        end=21.0,
        spans=(
            span("prefill", 10.5, 11.5, first=0, tokens=4),
            span("encode", 11.0, 14.0, item=0, rows=256),
            span("prefill", 15.0, 17.0, first=4, tokens=258),
            span("encode", 14.0, 17.0, item=1, rows=256),
            span("prefill", 18.0, 20.0, first=262, tokens=260),
            Span("first token", 20.5, 20.5),
            span("prefill", 20.5, 21.0, first=522, tokens=1),  # a decode step is no part of it
        ),
    )
    stages = floor.stages(line, [4, 262])
    assert stages.encode == (3.0, 3.0)
    assert stages.prefill == (1.0, 2.0, 2.0)
    assert stages.overlapped_floor == 8.0
    assert stages.serial_floor == 11.0
    assert stages.intake == 0.5
    assert stages.gaps == pytest.approx(0.5 + 1.0 + 0.5)  # before the first, between 17 and 18, behind the last


def test_prefill_bound_and_images_encoded_together():
    """One batch of two images in 1, then chunks of 4 and 4: 9."""
    spans = [span("encode", 0.0, 1.0, item=item, rows=256) for item in (0, 1)]
    spans += [span("prefill", 1.0, 5.0, first=0, tokens=300), span("prefill", 5.0, 9.0, first=300, tokens=300)]
    line = Timeline(0.0, 9.0, (*spans, Span("first token", 9.0, 9.0)))
    stages = floor.stages(line, [4, 262])
    assert (stages.encode, stages.overlapped_floor, stages.gaps) == ((1.0,), 9.0, 0.0)
