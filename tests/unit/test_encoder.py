"""The encode executor against transformers' own image features."""

import io
import json
import random

import numpy as np
import pytest
import torch
from epd_backend import cpu_attention, families, weights
from epd_backend.encoder import EncodeError, EncodeExecutor
from epd_scheduler.config import Config
from epd_scheduler.protocol import ArenaInfo, EncodePlan, EncodeUnit
from PIL import Image

from tests import checkpoints
from tests.reference import Reference

BLOCKS, BLOCK_SIZE = 128, 16
ARENA = ArenaInfo("a", "embedding", "cpu:0", "", (BLOCKS, BLOCK_SIZE, checkpoints.HIDDEN), "float32")
UNTOUCHED = 7.0


class OneArena:
    def __init__(self, dtype=torch.float32):
        self.tensor = torch.full(ARENA.shape, UNTOUCHED, dtype=dtype)

    def open(self, info):
        assert info == ARENA
        return self.tensor

    def rows(self, unit):
        return self.tensor[list(unit.blocks)].flatten(0, 1)


@pytest.fixture(scope="module", params=checkpoints.FAMILIES)
def path(request, tmp_path_factory):
    return checkpoints.make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def vision(path):
    return weights.load_part(path, "vision", torch.float32, torch.device("cpu"))


def pictures(count, seed=0):
    rng, sizes = np.random.default_rng(seed), random.Random(seed)
    shapes = [(sizes.randint(1, 180), sizes.randint(1, 180), 3) for _ in range(count)]
    return [Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)) for shape in shapes]


def encoded(image):
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def plan_for(path, images, seed=0):
    """A plan with scattered blocks for the images."""
    config = json.loads((path / "config.json").read_text())
    family, preprocessor = families.of(config), families.read_preprocessor(path)
    free = list(range(BLOCKS))
    random.Random(seed).shuffle(free)
    free.sort(key=lambda block: block // 2)  # some consecutive, some not
    units = []
    for index, image in enumerate(images):
        rows = family.layout(*image.size, preprocessor, config).rows
        blocks = [free.pop() for _ in range(-(-rows // BLOCK_SIZE))]
        units.append(EncodeUnit(seq=1, item=index, unit=0, media=index, rows=rows, blocks=tuple(blocks)))
    return EncodePlan(id=1, instance="encoder", arena=ARENA, units=tuple(units))


def expected_rows(path, images):
    """Embeddings of all images from the whole model and its processor, [rows, width]."""
    reference = Reference(path)
    family = families.of(reference.model.config.to_dict())
    inputs = reference.inputs((family.placeholder * len(images), images))
    more = {name: inputs[name] for name in family.features}
    with torch.inference_mode():
        out = reference.model.model.get_image_features(inputs["pixel_values"], **more, return_dict=True).pooler_output
    return torch.cat([feature.flatten(0, -2) for feature in out])


@pytest.mark.parametrize("products", [False, True])
def test_embeddings_are_transformers_own_and_land_in_their_blocks(monkeypatch, path, vision, products):
    if products:  # small images too take the attention that on a CPU is for large ones
        monkeypatch.setattr(cpu_attention, "LEAST", 20)
        monkeypatch.setattr(cpu_attention, "TILE", 7)
    images = pictures(5)
    plan, arenas = plan_for(path, images), OneArena()
    assert EncodeExecutor(Config(model=str(path)), vision, arenas).run(plan, [encoded(i) for i in images]) == {}

    got = torch.cat([arenas.rows(unit)[: unit.rows] for unit in plan.units])
    torch.testing.assert_close(got, expected_rows(path, images), rtol=1e-5, atol=1e-5)
    named = {block for unit in plan.units for block in unit.blocks}
    others = torch.cat(
        [arenas.tensor[[b for b in range(BLOCKS) if b not in named]].flatten(0, 1)]
        + [arenas.rows(unit)[unit.rows :] for unit in plan.units]
    )
    assert len(others) == BLOCKS * BLOCK_SIZE - len(got)
    assert (others == UNTOUCHED).all()


def test_a_batch_is_its_images_one_by_one(path, vision):
    images = pictures(4, seed=1)
    plan, together, alone = plan_for(path, images), OneArena(), OneArena()
    media = [encoded(image) for image in images]
    EncodeExecutor(Config(model=str(path)), vision, together).run(plan, media)
    for unit, data in zip(plan.units, media, strict=True):
        one = EncodePlan(id=1, instance="encoder", arena=ARENA, units=(unit,))
        EncodeExecutor(Config(model=str(path)), vision, alone).run(one, [data])
    torch.testing.assert_close(together.tensor, alone.tensor, rtol=1e-5, atol=1e-5)


def test_bad_media_fail_alone(path, vision):
    images = pictures(3, seed=2)
    plan, arenas = plan_for(path, images), OneArena()
    media = [encoded(image) for image in images]
    media[1] = media[1][: len(media[1]) // 2]
    errors = EncodeExecutor(Config(model=str(path)), vision, arenas).run(plan, media)
    assert list(errors) == [1]
    assert "truncated" in errors[1]
    assert (arenas.rows(plan.units[1]) == UNTOUCHED).all()
    got = torch.cat([arenas.rows(unit)[: unit.rows] for unit in (plan.units[0], plan.units[2])])
    torch.testing.assert_close(got, expected_rows(path, [images[0], images[2]]), rtol=1e-5, atol=1e-5)

    nothing = EncodePlan(id=1, instance="encoder", arena=ARENA, units=plan.units[:1])
    assert "empty" in EncodeExecutor(Config(model=str(path)), vision, arenas).run(nothing, [b""])[0]


def test_rows_are_cast_to_the_arenas_dtype(path, vision):
    images = pictures(1, seed=3)
    plan, exact, rounded = plan_for(path, images), OneArena(), OneArena(torch.bfloat16)
    for arenas in (exact, rounded):
        EncodeExecutor(Config(model=str(path)), vision, arenas).run(plan, [encoded(images[0])])
    assert torch.equal(exact.tensor.bfloat16(), rounded.tensor)


@pytest.mark.parametrize("change", [{"rows": 1, "blocks": (0,)}, {"blocks": tuple(range(BLOCKS))}])
def test_a_plan_that_does_not_fit_is_an_internal_error(path, vision, change):
    images = pictures(1)
    good = plan_for(path, images).units[0]
    fields = {"seq": 1, "item": 0, "unit": 0, "media": 0, "rows": good.rows, "blocks": good.blocks} | change
    plan = EncodePlan(id=1, instance="encoder", arena=ARENA, units=(EncodeUnit(**fields),))
    arenas = OneArena()
    with pytest.raises(EncodeError, match=f"item 0 of sequence 1 has {good.rows} embedding rows .* its plan has"):
        EncodeExecutor(Config(model=str(path)), vision, arenas).run(plan, [encoded(images[0])])
    assert (arenas.tensor == UNTOUCHED).all()
