"""What operators read and load names the metrics and keys that exist."""

import json
import re
from pathlib import Path

import msgspec
import pytest
import yaml
from epd_client.launch import Server
from epd_orchestrator.metrics import FAMILIES
from epd_scheduler import config
from epd_scheduler.config import Config, Section

ROOT = Path(__file__).parents[2]
METRICS = {family.name for family in FAMILIES}


def metrics_in(text: str) -> set[str]:
    names = re.findall(r"\bepd_(?!client|ensemble)\w+", text)
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def keys(kind: type[Section]) -> set[str]:
    """All keys of the configuration, with their sections'."""
    found = set()
    for field in msgspec.structs.fields(kind):
        nested = isinstance(field.type, type) and issubclass(field.type, Section)
        found |= {f"{field.name}.{key}" for key in keys(field.type)} if nested else {field.name}
    return found


def test_the_table_of_metrics_is_complete() -> None:
    table = (ROOT / "docs" / "operations.md").read_text()
    assert metrics_in(table) == METRICS


def test_the_dashboard_shows_metrics_that_exist() -> None:
    dashboard = json.loads((ROOT / "deploy" / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert metrics_in(" ".join(queries)) == METRICS


def test_keys_that_the_page_names_exist() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    named = set(re.findall(r"`((?:kv|embedding|scheduler|limits)\.[\w.]+)", page))
    assert named
    assert named <= keys(Config)


def test_the_shipped_configuration_states_the_defaults_of_every_key() -> None:
    raw = yaml.safe_load((ROOT / "deploy" / "epd.yaml").read_text())
    assert config.parse(raw) == Config()


@pytest.mark.parametrize("file", ["deploy/Dockerfile", "docs/operations.md"])
def test_the_options_of_the_launcher_are_those_of_the_pages(file: str) -> None:
    text = (ROOT / file).read_text()
    options = {
        "--model-control-mode=explicit",
        "--load-model=*",
        "--disable-auto-complete-config",
        "--backend-config=python,thread-pool-size=256",
        "--exit-timeout-secs=10",
    }
    assert {option for option in options if option in text} == options
    launcher = Path(Server.__init__.__code__.co_filename).read_text()
    assert all(option.split("=")[0] in launcher for option in options)


def test_the_manifest_is_yaml() -> None:
    kinds = [document["kind"] for document in yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())]
    assert kinds == ["Deployment", "Service"]
