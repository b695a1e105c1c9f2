"""Handwritten digits that digits-vl never saw in training, and images made of them.

The scans are the held-out part of scikit-learn's digits (`train_digits.py` has the split). Needs numpy and pillow.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

CHECKPOINT = Path(__file__).parent / "digits-vl"
HELDOUT = "heldout.npz"  # in the checkpoint's directory
QUESTION = "Read the digits."  # the one question that the model was trained on

Scan = npt.NDArray[np.uint8]
"""`[8, 8]`, white on black."""


def heldout() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """All held-out scans `[397, 8, 8]`, white on black, and the digits that they show `[397]`."""
    with np.load(CHECKPOINT / HELDOUT) as file:
        return file["scans"], file["labels"]


def render(scan: Scan, px: int = 56) -> Image.Image:
    """One digit as an RGB image of `px` x `px` pixels; the model was trained with 56 (4 embedding rows)."""
    return Image.fromarray(scan).resize((px, px), Image.Resampling.BICUBIC).convert("RGB")


def row(scans: Sequence[Scan] | npt.NDArray[np.uint8], px: int = 56) -> Image.Image:
    """Digits from left to right in one RGB image, `px` high and `px` wide each; the model was trained with up to 8."""
    image = Image.new("RGB", (px * len(scans), px))
    for index, scan in enumerate(scans):
        image.paste(render(scan, px), (px * index, 0))
    return image
