from pathlib import Path

import pytest
from epd_client.configure import Placement, TopologyError, parse_topology, write_repository
from epd_scheduler.config import config_path

ROOT = Path(__file__).resolve().parents[2]


def test_each_instance_is_a_model_of_its_own() -> None:
    assert parse_topology("2E1P2D") == [
        Placement("encoder", ("encode",), "cpu:0"),
        Placement("encoder_1", ("encode",), "cpu:1"),
        Placement("prefill", ("prefill",), "cpu:2"),
        Placement("decode", ("decode",), "cpu:3"),
        Placement("decode_1", ("decode",), "cpu:4"),
    ]


def test_letters_together_are_one_instance_and_stages_are_for_language_models() -> None:
    assert parse_topology("1E1PD", ["cuda:0", "cuda:1"], stages=4) == [
        Placement("encoder", ("encode",), "cuda:0", 1),
        Placement("language", ("prefill", "decode"), "cuda:1", 4),
    ]
    assert parse_topology("2EPD")[1] == Placement("aggregated_1", ("encode", "prefill", "decode"), "cpu:1")


@pytest.mark.parametrize(
    ("text", "devices", "message"),
    [
        ("", [], "is not like 2E1P2D"),
        ("1E1P1D1", [], "is not like 2E1P2D"),
        ("1X", [], "is not like 2E1P2D"),
        ("1E1P", [], "no instance for D"),
        ("1E1P1D", ["cpu:0"], "3 instances, but 1 devices"),
        ("1EPD", ["gpu0"], "device 'gpu0' is not like"),
    ],
)
def test_a_topology_that_cannot_be_says_why(text: str, devices: list[str], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        parse_topology(text, devices)


def test_the_repository_links_the_code_and_finds_the_configuration(tmp_path: Path) -> None:
    target = tmp_path / "repository"
    write_repository(ROOT / "model_repository", target, parse_topology("1E1P1D"))
    assert sorted(path.name for path in target.iterdir()) == ["decode", "encoder", "epd_ensemble", "prefill"]
    for model in target.iterdir():
        assert (model / "1" / "model.py").is_file()
        assert config_path(str(model)) == ROOT / "deploy" / "epd.yaml"
    with pytest.raises(TopologyError, match="is not empty"):
        write_repository(ROOT / "model_repository", target, parse_topology("1E1P1D"))


def test_the_orchestrator_is_told_its_workers(tmp_path: Path) -> None:
    write_repository(ROOT / "model_repository", tmp_path / "r", parse_topology("1E1PD"))
    assert 'string_value: "encoder,language"' in (tmp_path / "r" / "epd_ensemble" / "config.pbtxt").read_text()


@pytest.mark.parametrize("placement", parse_topology("1E1P1D"), ids=lambda placement: placement.name)
def test_the_repository_that_ships_is_what_configure_writes_for_1e1p1d(placement: Placement, tmp_path: Path) -> None:
    write_repository(ROOT / "model_repository", tmp_path / "r", [placement])

    def essence(path: Path) -> list[str]:
        lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
        ordered = sorted(line for line in lines if line)
        return [line for line in ordered if '"stages"' not in line]  # an encoder has none to speak of

    shipped = ROOT / "model_repository" / placement.name / "configs" / "cpu.pbtxt"
    assert essence(tmp_path / "r" / placement.name / "config.pbtxt") == essence(shipped)


def test_a_source_that_is_no_model_repository_leaves_no_trace(tmp_path):
    with pytest.raises(TopologyError, match=r"elsewhere has no model 'epd_ensemble'; .* --source"):
        write_repository(tmp_path / "elsewhere", tmp_path / "r", parse_topology("1E1P1D"))
    assert not (tmp_path / "r").exists()
