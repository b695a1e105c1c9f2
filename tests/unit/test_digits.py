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
    rng = np.random.default_rng(5)
    right = total = 0
    for _ in range(100):
        chosen = rng.integers(0, len(scans), int(rng.integers(1, 9)))
        images = [digits.row(scans[chosen])] if kind == "row" else [digits.render(scans[i]) for i in chosen]
        content = [{"type": "image", "image": image} for image in images]
        content.append({"type": "text", "text": digits.QUESTION})
        answer = reference.text(reference.generate([{"role": "user", "content": content}], 12))
        right += sum(a == b for a, b in zip(answer, "".join(map(str, labels[chosen])), strict=False))
        total += len(chosen)
    print(f"{kind}: {right} of {total} digits right")
    assert right / total >= 0.99
