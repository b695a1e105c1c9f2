from pathlib import Path

import numpy as np
import pytest
from epd_scheduler.metrics_summary import SLO
from epd_scheduler.workload import Kind, Mix, RequestSpec, WorkloadError, generate, load_mix, load_trace

MIXES = sorted((Path(__file__).parents[2] / "deploy" / "workloads").glob("*.yaml"))
TEXT = Kind(name="text", share=3, text_tokens=(10, 1000), output_tokens=(4, 4))
VIDEO = Kind(
    name="video", share=1, text_tokens=(8, 8), output_tokens=(1, 64), images=(2, 4), sizes=((56, 56), (112, 56))
)
MIX = Mix("example", (TEXT, VIDEO))


def test_the_same_seed_gives_the_same_workload() -> None:
    assert generate(MIX, rate=2.0, count=50, seed=7) == generate(MIX, rate=2.0, count=50, seed=7)
    assert generate(MIX, rate=2.0, count=50, seed=7) != generate(MIX, rate=2.0, count=50, seed=8)


def test_the_rate_changes_the_times_alone() -> None:
    slow, fast = (generate(MIX, rate=rate, count=50) for rate in (1.0, 4.0))
    assert [spec.at for spec in slow] == pytest.approx([4 * spec.at for spec in fast])
    assert [(s.kind, s.text_tokens, s.images) for s in slow] == [(s.kind, s.text_tokens, s.images) for s in fast]


def test_arrivals_are_poisson() -> None:
    """Gaps of a Poisson process have their mean as standard deviation, and 1 - 1/e of them are shorter."""
    gaps = np.diff([spec.at for spec in generate(MIX, rate=5.0, count=20_000)])
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(0.2, rel=0.03)
    assert (gaps < 0.2).mean() == pytest.approx(0.632, abs=0.01)


def test_shares_and_ranges() -> None:
    specs = generate(MIX, rate=1.0, count=4000)
    texts = [spec for spec in specs if spec.kind == "text"]
    videos = [spec for spec in specs if spec.kind == "video"]
    assert len(texts) / len(specs) == pytest.approx(0.75, abs=0.03)
    assert {len(spec.images) for spec in videos} == {2, 3, 4}
    assert {size for spec in videos for size in spec.images} == {(56, 56), (112, 56)}
    assert all(len(set(spec.images)) == 1 for spec in videos)
    assert {spec.output_tokens for spec in texts} == {4}
    tokens = [spec.text_tokens for spec in texts]
    assert (min(tokens), max(tokens)) == (10, pytest.approx(1000, rel=0.01))
    assert np.median(tokens) == pytest.approx(100, rel=0.1)  # log-uniform


def test_a_trace_is_read_back_in_order_of_time(tmp_path: Path) -> None:
    late = RequestSpec(at=2.0, kind="text", text_tokens=5, output_tokens=1)
    early = RequestSpec(at=0.5, kind="image", text_tokens=5, output_tokens=1, images=((56, 56),))
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"at": 2.0, "kind": "text", "text_tokens": 5, "output_tokens": 1}\n'
        '{"at": 0.5, "kind": "image", "text_tokens": 5, "output_tokens": 1, "images": [[56, 56]]}\n'
    )
    assert load_trace(path) == [early, late]


@pytest.mark.parametrize("path", MIXES, ids=lambda path: path.stem)
def test_the_mixes_that_ship(path: Path) -> None:
    mix = load_mix(path)
    assert mix.name == path.stem
    assert sum(kind.share for kind in mix.kinds) == pytest.approx(1)
    assert all(slo != SLO() for slo in mix.slos.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nkinds: []", "shares"),
        ("name: a\nkinds: [{name: t, share: 1, text_tokens: [5, 2], output_tokens: [1, 1]}]", "'text_tokens' must be"),
        ("name: a\nkinds: [{name: t, share: 1, text_tokens: [1, 2], output_tokens: [1, 1], images: [1, 1]}]", "sizes"),
        ("name: a\nkinds: [{name: t, share: 1, colour: red}]", "colour"),
    ],
)
def test_mixes_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mix.yaml"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        load_mix(path)


def test_an_empty_trace_and_a_rate_of_zero_are_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("")
    with pytest.raises(WorkloadError, match="is empty"):
        load_trace(tmp_path / "trace.jsonl")
    with pytest.raises(WorkloadError, match="above 0"):
        generate(MIX, rate=0.0, count=1)
