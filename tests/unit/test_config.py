"""What the configuration file may say."""

from pathlib import Path
from typing import Any

import pytest
from epd_scheduler import config
from epd_scheduler.config import ConfigError


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"scheduler": {"token_budget": 0}}, "x: Expected `int` >= 1 - at `$.scheduler.token_budget`"),
        ({"scheduler": {"max_rows": 0}}, "Expected `int` >= 1 - at `$.scheduler.max_rows`"),
        ({"scheduler": {"rps": {"share": 1.1}}}, "Expected `float` <= 1.0 - at `$.scheduler.rps.share`"),
        ({"kv": {"blocks": -1}}, "Expected `int` >= 1 - at `$.kv.blocks`"),
        ({"embedding": {"block_size": 0}}, "Expected `int` >= 1 - at `$.embedding.block_size`"),
        ({"limits": {"stall_seconds": 0}}, "Expected `float` > 0.0 - at `$.limits.stall_seconds`"),
        ({"limits": {"images": -1}}, "Expected `int` >= 0 - at `$.limits.images`"),
        ({"dtype": "int8"}, "Invalid enum value 'int8' - at `$.dtype`"),
        ({"kv": {"block": 3}}, "x: kv: unknown key 'block'; did you mean 'blocks'?"),
        ({"kv": 3}, "x: kv: expected a mapping, got int"),
        ([], "x: expected a mapping, got list"),
    ],
)
def test_what_cannot_be_served_with_is_refused_by_key(raw: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(raw, "x")
    assert message in str(caught.value)


def test_a_file_that_is_no_mapping_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "epd.yaml"
    path.write_text("- kv\n")
    monkeypatch.setenv("EPD_MODEL", "elsewhere")
    with pytest.raises(ConfigError, match=r"epd\.yaml: expected a mapping, got list"):
        config.load(path)
