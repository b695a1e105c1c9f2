"""The load generator against the real server: what it sends is what arrives, what it reports is what happened."""

from pathlib import Path

import pytest
from epd_client import bench, load, profile_builder
from epd_client.cli import app
from epd_client.client import Client
from epd_client.launch import Server
from epd_client.payload import TextMaker
from epd_client.profiling import Profiler, Samples, decode_sample
from epd_scheduler.config import load as load_config
from epd_scheduler.metrics_summary import SLO
from epd_scheduler.workload import Kind, Mix, RequestSpec, generate
from typer.testing import CliRunner

WORKLOADS = Path(__file__).resolve().parents[2] / "deploy" / "workloads"
MIX = Mix(
    "small",
    (
        Kind(name="text", share=2, text_tokens=(20, 40), output_tokens=(4, 8), slo=SLO(ttft_s=30.0)),
        Kind(name="image", share=1, text_tokens=(8, 8), output_tokens=(3, 3), images=(1, 2), sizes=((56, 56),)),
    ),
)


def test_lengths_and_times_are_those_of_the_workload(client: Client, server: Server) -> None:
    specs = generate(MIX, rate=20.0, count=9, seed=3)
    text = TextMaker.calibrate(client)
    seen = load.run(server.grpc, load.prepare(specs, text), timeout_s=60)
    assert [len(observation.tokens) for observation in seen] == [spec.output_tokens for spec in specs]
    for observation in seen:
        assert observation.error == ""
        assert observation.sent >= observation.spec.at
        assert observation.tokens == sorted(observation.tokens)
        assert observation.timeline is not None
        encoded = {span.detail["item"] for span in observation.timeline.spans if span.name == "encode"}
        assert encoded == set(range(len(observation.spec.images)))
        if not observation.spec.images:
            assert observation.input_tokens == pytest.approx(observation.spec.text_tokens, abs=text.tokens_word / 2)


def test_failures_are_counted(client: Client, server: Server) -> None:
    specs = [
        RequestSpec(at=0.0, kind="text", text_tokens=10, output_tokens=2),
        RequestSpec(at=0.1, kind="text", text_tokens=100_000, output_tokens=2),  # past the context
    ]
    run = bench.measure(
        server.grpc, specs, TextMaker.calibrate(client), label="example", workload="example", slos={"text": SLO()}
    )
    assert (run.summary.overall.requests, run.summary.overall.failed, run.summary.overall.attainment) == (2, 1, 0.5)
    assert run.results[1].error.startswith("INVALID_ARGUMENT: the prompt has")


def test_without_a_server_every_request_fails_and_none_hangs() -> None:
    spec = RequestSpec(at=0.0, kind="text", text_tokens=10, output_tokens=2)
    (seen,) = load.run("127.0.0.1:1", load.prepare([spec], TextMaker(1.0, 0.0)), timeout_s=20)
    assert seen.error.startswith("UNAVAILABLE")


def test_commands(server: Server, tmp_path: Path) -> None:
    results = tmp_path / "bench.json"
    arguments = ["--url", server.grpc, "--rate", "8", "--rate", "16", "--requests", "6", "--out", str(results)]
    done = CliRunner().invoke(app, ["bench", "--workload", str(WORKLOADS / "text.yaml"), *arguments])
    assert done.exit_code == 0, done.output
    runs = bench.read([results])
    assert [run.summary.overall.requests for run in runs] == [6, 6]
    assert runs[0].rate * 2 == pytest.approx(runs[1].rate)
    drawn = CliRunner().invoke(app, ["plot", str(results), "--out", str(tmp_path)])
    assert drawn.exit_code == 0, drawn.output
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "occupancy_server.png",
        "slo_attainment.png",
        "ttft_cdf.png",
        "ttft_rate.png",
    }


def test_a_profiler_reads_its_probes_off_the_server(client: Client, server: Server) -> None:
    config = load_config(Path(__file__).resolve().parents[2] / "deploy" / "epd.yaml")
    _, layout = profile_builder.read_layout(Path(config.model))
    profiler = Profiler(server.grpc, config, layout, TextMaker.calibrate(client))
    samples = Samples()
    (text,) = profiler.send([RequestSpec(at=0.0, kind="probe", text_tokens=600, output_tokens=2)])
    samples.add(text, config.kv.block_size)
    assert [sample.rows for sample in samples.prefill] == [((0, 512),), ((512, 88),)]
    assert [sample.blocks for sample in samples.migrate] == [38]
    (images,) = profiler.send(
        [RequestSpec(at=0.0, kind="probe", text_tokens=8, output_tokens=2, images=((112, 112),) * 3)]
    )
    samples.add(images, config.kv.block_size)
    assert [sample.rows for sample in samples.encode] == [layout(112, 112) * 3]
    batch = profiler.send([RequestSpec(at=0.0, kind="probe", text_tokens=20, output_tokens=40)] * 2)
    step = decode_sample(batch)
    assert step is not None
    assert len(step.rows) == 2
    assert step.seconds > 0
