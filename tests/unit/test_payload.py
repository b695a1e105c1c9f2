import io

import numpy as np
from epd_client import load, payload
from epd_client.payload import TextMaker
from epd_scheduler.workload import RequestSpec
from PIL import Image

IMAGES = RequestSpec(at=0.0, kind="image", text_tokens=4, output_tokens=2, images=((60, 40), (60, 40)))


def test_texts_have_their_length_and_differ() -> None:
    maker = TextMaker(tokens_word=2.0, tokens_fixed=1.0)
    random = np.random.default_rng(0)
    first, second = maker.text(21, random), maker.text(21, random)
    assert len(first.split()) == len(second.split()) == 10
    assert first != second
    assert len(maker.text(1, random).split()) == 1  # an empty prompt would be refused


def test_images_have_their_size_and_are_distinct_unless_told_otherwise() -> None:
    first, second = payload.images(IMAGES, [0, 1], distinct=True)
    assert Image.open(io.BytesIO(first)).size == (60, 40)
    assert first != second
    assert payload.images(IMAGES, [0, 1], distinct=True) == [first, second]
    assert payload.images(IMAGES, [0, 2], distinct=True) != [first, second]
    same = payload.images(IMAGES, [0, 1], distinct=False) + payload.images(IMAGES, [0, 2], distinct=False)
    assert len(set(same)) == 1


def test_the_same_seed_builds_the_same_requests() -> None:
    def tensors(seed: int) -> list[bytes]:
        (prepared,) = load.prepare([IMAGES], TextMaker(1.0, 0.0), seed=seed)
        return list(prepared.message.raw_input_contents)

    assert tensors(1) == tensors(1)
    assert tensors(1) != tensors(2)
