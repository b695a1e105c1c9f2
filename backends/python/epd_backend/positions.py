"""Rotary positions of a prompt with images.

Equal to `get_rope_index` of transformers' Qwen2-VL and Qwen2.5-VL ("mrope"), and to a plain range for models with
one-dimensional positions ("flat").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Rule = Literal["mrope", "flat"]


def positions(
    rule: Rule, tokens: int, items: Sequence[tuple[int, int, tuple[int, int, int] | None]]
) -> tuple[npt.NDArray[np.int32], int]:
    """Positions of a prompt of `tokens` tokens.

    `items` holds (start, rows, grid) of each image, in prompt order: its first token, its number of tokens, and
    `ImageLayout.grid`, whose product is `rows` (mRoPE only).
    Returns int32 `[3, tokens]` (time, height, width) for "mrope" or `[1, tokens]` for "flat", and a delta: the
    token generated at index i has position i + delta in every component.
    """
    if rule == "flat":
        return np.arange(tokens, dtype=np.int32)[None], 0
    out = np.empty((3, tokens), dtype=np.int32)
    at = position = 0
    for start, rows, grid in items:
        assert grid is not None, "an image of an mRoPE model has a grid"
        position = _text(out, at, start, position)
        out[:, start : start + rows] = np.indices(grid, dtype=np.int32).reshape(3, rows) + position
        # The text after an image continues behind its longer side, not behind its last row.
        position += max(grid[1:])
        at = start + rows
    return out, _text(out, at, tokens, position) - tokens


def _text(out: npt.NDArray[np.int32], first: int, end: int, position: int) -> int:
    """Count tokens `first ..< end` from `position` on; the position after them."""
    out[:, first:end] = np.arange(position, position + end - first, dtype=np.int32)
    return position + end - first
