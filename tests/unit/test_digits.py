"""The checkpoint that ships reads digits that it never saw, with plain transformers."""

import numpy as np
import pytest

from models import digits
from tests.reference import Reference


@pytest.fixture(scope="module")
def reference():
    return Reference(digits.CHECKPOINT)


def test_heldout_scans():
    scans, labels = digits.heldout()
    assert (scans.shape, scans.dtype, labels.shape) == ((397, 8, 8), np.uint8, (397,))
    assert np.bincount(labels).tolist() == [38, 43, 33, 47, 43, 38, 39, 40, 45, 31]
    assert digits.row(scans[:3], 56).size == (168, 56)
    assert digits.row(scans[:3], 56).crop((56, 0, 112, 56)).tobytes() == digits.render(scans[1], 56).tobytes()


@pytest.mark.parametrize("kind", ["multi", "row"])
def test_reads_heldout_digits(reference, kind):
    scans, labels = digits.heldout()
    right = first = prompts = 0
    while first < len(scans):  # every scan once, 1 to 8 in a prompt
        chosen = range(first, min(first + prompts % 8 + 1, len(scans)))
        first, prompts = chosen.stop, prompts + 1
        images = (
            [digits.row([scans[i] for i in chosen])] if kind == "row" else [digits.render(scans[i]) for i in chosen]
        )
        content = [{"type": "image", "image": image} for image in images]
        content.append({"type": "text", "text": digits.QUESTION})
        answer = reference.text(reference.generate([{"role": "user", "content": content}], 12))
        right += sum(a == b for a, b in zip(answer, "".join(str(labels[i]) for i in chosen), strict=False))
    print(f"{kind}: {right} of {len(scans)} digits right")
    assert right / len(scans) >= 0.99
