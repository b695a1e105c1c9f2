"""Positions against transformers' get_rope_index."""

import random

import numpy as np
import pytest
import torch
import transformers
from epd_backend.positions import positions


def model(kind):
    """A skeleton without weights: get_rope_index needs the configuration alone."""
    config = {"qwen2_vl": transformers.Qwen2VLConfig, "qwen2_5_vl": transformers.Qwen2_5_VLConfig}[kind]()
    with torch.device("meta"):
        config.text_config.num_hidden_layers = config.vision_config.depth = 1
        return transformers.AutoModel.from_config(config)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_mrope_is_get_rope_index(kind):
    reference = model(kind)
    rng = random.Random(0)
    for count in (0, 1, 1, 2, 3, 8):
        items, types = [], [0] * rng.randint(0 if count else 1, 5)
        for _ in range(count):
            grid = (1, rng.randint(1, 9), rng.randint(1, 9))
            rows = grid[1] * grid[2]
            items.append((len(types), rows, grid))
            types += [1] * rows + [0] * rng.randint(1, 5)
        if count == 1:
            types = types[: items[0][0] + items[0][1]]  # an image at the end
        patches = [[t, 2 * h, 2 * w] for _, _, (t, h, w) in items]
        expected, delta = reference.get_rope_index(
            torch.zeros(1, len(types), dtype=torch.long),
            torch.tensor([types]),
            image_grid_thw=torch.tensor(patches) if patches else None,
        )
        got, got_delta = positions("mrope", len(types), items)
        assert got.dtype == np.int32
        assert got.tolist() == expected[:, 0].tolist()
        assert got_delta == delta.item()


def test_mrope_by_hand():
    got, delta = positions("mrope", 8, [(1, 6, (1, 2, 3))])
    assert got.tolist() == [[0, 1, 1, 1, 1, 1, 1, 4], [0, 1, 1, 1, 2, 2, 2, 4], [0, 1, 2, 3, 1, 2, 3, 4]]
    assert delta == 5 - 8


def test_images_back_to_back():
    got, delta = positions("mrope", 4, [(0, 2, (1, 1, 2)), (2, 2, (1, 2, 1))])
    assert got.tolist() == [[0, 0, 2, 2], [0, 0, 2, 3], [0, 1, 2, 2]]
    assert delta == 0


def test_flat_is_a_range():
    got, delta = positions("flat", 4, [(1, 2, None)])
    assert (got.tolist(), delta, got.dtype) == ([[0, 1, 2, 3]], 0, np.int32)
