"""Layouts against what transformers' processors make of real images."""

import json
import random

import numpy as np
import pytest
from epd_backend import families
from PIL import Image

from tests import checkpoints
from tests.reference import load_processor

SIZES = [(1, 1), (56, 56), (57, 55), (112, 224), (200, 1), (1, 200), (640, 480), (3, 500), (333, 77), (28, 1400)]


@pytest.fixture(scope="module", params=checkpoints.FAMILIES)
def checkpoint(request, tmp_path_factory):
    return checkpoints.make(request.param, tmp_path_factory.mktemp(request.param))


def test_expanded_prompt_is_the_processors(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    family, preprocessor = families.of(config), families.read_preprocessor(checkpoint)
    processor = load_processor(checkpoint)
    placeholder = family.placeholder
    assert processor.tokenizer.convert_tokens_to_ids(placeholder) == family.placeholder_id(config)

    rng = random.Random(0)
    sizes = SIZES + [(rng.randint(4, 700), rng.randint(4, 700)) for _ in range(40)]
    images = [Image.fromarray(np.zeros((height, width, 3), np.uint8)) for width, height in sizes]
    expected = processor(text=[f"a{placeholder}b" * len(images)], images=images)["input_ids"][0]

    layouts = [family.layout(*size, preprocessor, config) for size in sizes]
    text = "".join(f"a{layout.before}{placeholder * layout.rows}{layout.after}b" for layout in layouts)
    assert processor.tokenizer(text).input_ids == expected
    for layout in layouts:
        assert layout.grid is None or np.prod(layout.grid) == layout.rows


@pytest.mark.parametrize(
    ("model_type", "settings", "size", "rows"),
    [
        # Released settings; counts computed with the processors of transformers 5.24.
        ("qwen2_5_vl", {"min_pixels": 3136, "max_pixels": 12845056}, (1920, 1080), 2691),
        ("qwen2_5_vl", {"min_pixels": 3136, "max_pixels": 12845056}, (8000, 6000), 16170),
        ("qwen2_vl", {"size": {"shortest_edge": 3136, "longest_edge": 1003520}}, (1920, 1080), 1222),
        ("internvl", {"size": {"height": 448, "width": 448}, "max_patches": 12}, (1920, 1080), 9 * 256),
        ("internvl", {"size": {"height": 448, "width": 448}, "max_patches": 12}, (448, 448), 256),
        ("llava_onevision", {"size": {"height": 384, "width": 384}, "num_image_tokens": 729}, (1920, 1080), 7269),
        ("llava_onevision", {"size": {"height": 384, "width": 384}, "num_image_tokens": 729}, (384, 384), 1485),
    ],
)
def test_rows_with_the_settings_of_released_models(model_type, settings, size, rows):
    sides = range(384, 2305, 384)
    config = {"model_type": model_type, "image_grid_pinpoints": [[y, x] for y in sides for x in sides]}
    assert families.of(config).layout(*size, settings, config).rows == rows


def test_qwen_refuses_what_its_processor_refuses():
    layout = families.TABLE["qwen2_5_vl"].layout
    assert layout(200, 1, {}, {}).rows > 0
    with pytest.raises(ValueError, match=r"1 x 5000 pixels has an aspect ratio above 200; crop or pad"):
        layout(1, 5000, {}, {})


def test_unsupported_model_names_the_supported_ones():
    with pytest.raises(families.UnsupportedModelError, match=r"'gpt2' is not supported; .*qwen2_5_vl"):
        families.of({"model_type": "gpt2"})


def test_preprocessor_settings_nested_in_the_processors_win(tmp_path):
    with pytest.raises(FileNotFoundError, match="no preprocessor_config"):
        families.read_preprocessor(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 14}')
    (tmp_path / "processor_config.json").write_text('{"num_image_tokens": 9}')
    assert families.read_preprocessor(tmp_path) == {"patch_size": 14, "num_image_tokens": 9}
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"patch_size": 16}, "image_seq_length": 4}')
    assert families.read_preprocessor(tmp_path) == {"patch_size": 16, "image_seq_length": 4}
