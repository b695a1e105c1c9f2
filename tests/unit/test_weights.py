"""Each half of a checkpoint holds its own weights and none of the other's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from epd_backend import families
from epd_backend.cpu import PackedLinear
from epd_backend.weights import load_part, weight_bytes
from PIL import Image
from safetensors import safe_open

from tests import checkpoints
from tests.reference import Reference

DIGITS = Path(__file__).parents[2] / "models" / "digits-vl"
CPU = torch.device("cpu")


def stored(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path / "model.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors = dict(model.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            packed = module.packed
            tensors[f"{name}.weight"] = packed.weight.to_dense().split(packed.sizes)[module.index]
            if packed.bias is not None:
                tensors[f"{name}.bias"] = packed.bias.split(packed.sizes)[module.index]
    return tensors


def size(tensors: dict[str, torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


def test_bytes_of_the_halves_of_digits_vl():
    total = size(stored(DIGITS))
    visual = size({key: t for key, t in stored(DIGITS).items() if "visual" in key})
    vision = load_part(DIGITS, "vision", torch.float16, CPU)  # as many bytes as stored, and not packed
    language = load_part(DIGITS, "language", torch.float16, CPU)
    assert size(parameters(vision)) == visual
    assert size(parameters(language)) == total - visual
    assert 0 < visual < total
    # Besides the parameters there are only the tables of the rotary embeddings.
    assert 0 <= weight_bytes(vision) - visual < 1024
    assert 0 <= weight_bytes(language) - (total - visual) < 1024


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_halves_add_up_to_the_whole(family, tmp_path):
    path = checkpoints.make(family, tmp_path)
    vision = parameters(load_part(path, "vision", torch.float32, CPU))
    language = parameters(load_part(path, "language", torch.float32, CPU))
    assert not vision.keys() & language.keys()
    assert size(vision) + size(language) == size(stored(path))
    assert all("language_model" in key or "lm_head" in key for key in language)


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_halves_in_bfloat16_compute_what_the_whole_does(family, tmp_path):
    """On a CPU their linear layers have no `weight`: transformers' code must do without."""
    path = checkpoints.make(family, tmp_path)
    whole = Reference(path, torch.bfloat16)
    vision, language = (load_part(path, part, torch.bfloat16, CPU) for part in ("vision", "language"))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 120, 3), np.uint8))
    inputs = whole.inputs([{"role": "user", "content": [{"type": "image", "image": picture}]}])
    images = {name: inputs[name] for name in families.TABLE[family].features}
    images["pixel_values"] = inputs["pixel_values"].to(vision.dtype)

    def features(model):
        made = model.model.get_image_features(**images, return_dict=True).pooler_output
        return torch.cat([each.flatten(0, -2) for each in made])

    def logits(model):
        text = model.model.language_model
        return model.lm_head(text(inputs_embeds=text.embed_tokens(torch.arange(5, 45)[None])).last_hidden_state)

    with torch.inference_mode():
        for half, compute in ((vision, features), (language, logits)):
            expected = compute(whole.model).float()
            assert (compute(half).float() - expected).norm() < 0.01 * expected.norm()


def test_stages_hold_their_layers_and_keep_their_indices():
    whole = parameters(load_part(DIGITS, "language", torch.float32, CPU))
    stages = [parameters(load_part(DIGITS, "language", torch.float32, CPU, cut)) for cut in ((0, 1), (1, 3), (3, 4))]
    for stage, layers in zip(stages, ({"0"}, {"1", "2"}, {"3"}), strict=True):
        assert {key.split(".")[3] for key in stage if ".layers." in key} == layers
        assert all(torch.equal(value, whole[key]) for key, value in stage.items())
    assert set().union(*stages) == whole.keys()
    # The embedding is tied to the head: the first stage and the last need it, those between do not.
    assert ["model.language_model.embed_tokens.weight" in stage for stage in stages] == [True, False, True]
    assert ["model.language_model.norm.weight" in stage for stage in stages] == [False, False, True]
