"""The supported model families, one row each: what differs between them outside transformers' own classes.

Imports neither torch nor transformers: the orchestrator uses it too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from epd_backend import geometry
from epd_backend.geometry import ImageLayout
from epd_backend.positions import Rule

__all__ = ["TABLE", "Family", "ImageLayout", "UnsupportedModelError", "of", "read_preprocessor"]


class UnsupportedModelError(ValueError):
    """The checkpoint's model type is not in the table."""


@dataclass(frozen=True)
class Family:
    """How a family's checkpoint is split, its images are counted and its positions are made."""

    model_type: str  # of config.json
    language: str  # the text model, an attribute of `model.model`
    vision: tuple[str, ...]  # attributes of `model.model` that only the encoder needs
    features: tuple[str, ...]  # arguments of `get_image_features` besides `pixel_values`
    positions: Rule
    placeholder: str  # the token that stands for an image in a prompt, and for one embedding row after expansion
    geometry: Callable[[int, int, Mapping[str, Any], Mapping[str, Any]], ImageLayout]
    options: Mapping[str, Any] = field(default_factory=dict)  # which the processor passes to its image processor

    def placeholder_id(self, config: Mapping[str, Any]) -> int:
        """The token id of the placeholder, from config.json. Raises UnsupportedModelError if it names none."""
        for key in ("image_token_id", "image_token_index"):
            if key in config:
                return int(config[key])
        raise UnsupportedModelError("config.json has no 'image_token_id'; use a checkpoint that takes images")

    def layout(
        self, width: int, height: int, preprocessor: Mapping[str, Any], config: Mapping[str, Any]
    ) -> ImageLayout:
        """Tokens and embedding rows of an image of `width` x `height` pixels, as it is after EXIF rotation.

        `preprocessor` is what `read_preprocessor` returns, `config` is config.json.
        Raises ValueError for a size that the model's image processor refuses.
        """
        return self.geometry(width, height, preprocessor, config)


_QWEN2_5_VL = Family(
    model_type="qwen2_5_vl",
    language="language_model",
    vision=("visual",),
    features=("image_grid_thw",),
    positions="mrope",
    placeholder="<|image_pad|>",
    geometry=geometry.qwen,
)

_ROWS = (
    _QWEN2_5_VL,
    replace(_QWEN2_5_VL, model_type="qwen2_vl"),
    Family(
        model_type="llava_onevision",
        language="language_model",
        vision=("vision_tower", "multi_modal_projector", "image_newline"),
        features=("image_sizes",),
        positions="flat",
        placeholder="<image>",
        geometry=geometry.llava_onevision,
    ),
    Family(
        model_type="internvl",
        language="language_model",
        vision=("vision_tower", "multi_modal_projector"),
        features=(),
        positions="flat",
        placeholder="<IMG_CONTEXT>",
        geometry=geometry.internvl,
        options={"crop_to_patches": True},
    ),
)

TABLE: Mapping[str, Family] = {family.model_type: family for family in _ROWS}


def of(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint, by the `model_type` of its config.json. Raises UnsupportedModelError."""
    model_type = str(config.get("model_type"))
    if model_type not in TABLE:
        raise UnsupportedModelError(
            f"model type {model_type!r} is not supported; use a checkpoint of type {', '.join(sorted(TABLE))}"
        )
    return TABLE[model_type]


def read_preprocessor(path: str | Path) -> dict[str, Any]:
    """Settings of a checkpoint's processor and image processor, merged.

    The image processor's come from `processor_config.json` if they are nested there, else from
    `preprocessor_config.json`; transformers looks in the same order. Raises FileNotFoundError if there are none.
    """
    path = Path(path)
    processor_file, image_file = path / "processor_config.json", path / "preprocessor_config.json"
    processor: dict[str, Any] = json.loads(processor_file.read_text()) if processor_file.exists() else {}
    image: dict[str, Any] | None = processor.get("image_processor")
    if image is None:
        if not image_file.exists():
            raise FileNotFoundError(f"{path} has no preprocessor_config.json; copy it from the released checkpoint")
        image = dict(json.loads(image_file.read_text()))
    return {**{key: value for key, value in processor.items() if not isinstance(value, dict)}, **image}
