"""From the size of an image to the prompt tokens and embedding rows that it takes, without its pixels.

One function a kind of model. Each repeats the arithmetic of the image processor and processor in transformers 5.24
that it names, rounding included: the counts must agree exactly, or the prompt does not fit its embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ImageLayout:
    """What one placeholder of the prompt becomes: `before`, `sum(units)` placeholder tokens, `after`."""

    before: str
    units: tuple[int, ...]  # embedding rows of each encoder unit, in prompt order
    after: str
    grid: tuple[int, int, int] | None = None  # (time, height, width) in rows, for mRoPE; its product is sum(units)

    @property
    def rows(self) -> int:
        """Embedding rows of the image."""
        return sum(self.units)


def qwen(width: int, height: int, preprocessor: Mapping[str, Any], _config: Mapping[str, Any]) -> ImageLayout:
    """Layout for Qwen2-VL and Qwen2.5-VL: one row for each `merge_size` x `merge_size` patches of the resized image.

    Source: `smart_resize` of `image_processing_pil_qwen2_vl`. Raises ValueError for an aspect ratio above 200.
    """
    if max(width, height) > 200 * min(width, height):
        raise ValueError(
            f"an image of {width} x {height} pixels has an aspect ratio above 200; crop or pad it to a squarer shape"
        )
    size = preprocessor.get("size") or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    # The legacy keys win over `size`, as in the processor's constructor.
    least = preprocessor.get("min_pixels") or size["shortest_edge"]
    most = preprocessor.get("max_pixels") or size["longest_edge"]
    cell = preprocessor.get("patch_size", 14) * preprocessor.get("merge_size", 2)  # pixels a row, in each direction
    rows, columns = round(height / cell), round(width / cell)
    if rows * columns * cell * cell > most:
        scale = math.sqrt((height * width) / most)
        rows = max(1, math.floor(height / scale / cell))
        columns = max(1, math.floor(width / scale / cell))
    elif rows * columns * cell * cell < least:
        scale = math.sqrt(least / (height * width))
        rows = math.ceil(height * scale / cell)
        columns = math.ceil(width * scale / cell)
    return ImageLayout("", (rows * columns,), "", (1, rows, columns))


def internvl(width: int, height: int, preprocessor: Mapping[str, Any], config: Mapping[str, Any]) -> ImageLayout:
    """Layout for InternVL: tiles of one size in row-major order, then a thumbnail unless there is one tile only.

    Source: `get_optimal_tiled_canvas` of `image_processing_pil_got_ocr2`, `replace_image_token` of
    `processing_internvl`.
    """
    size = preprocessor.get("size") or {"height": 384, "width": 384}
    least, most = preprocessor.get("min_patches", 1), preprocessor.get("max_patches", 12)
    tiles = _tiles(width, height, size["width"] * size["height"], least, most) if most > 1 else 1
    a_tile = preprocessor.get("image_seq_length") or config.get("image_seq_length", 256)
    return ImageLayout("<img>", (a_tile * (tiles + 1 if tiles > 1 else 1),), "</img>")


def _tiles(width: int, height: int, area: int, least: int, most: int) -> int:
    """Number of tiles of `area` pixels in the grid whose aspect ratio is closest to the image's."""
    grids = [(x, y) for x in range(1, most + 1) for y in range(1, most + 1) if least <= x * y <= most]
    best, nearest = 1, math.inf
    for x, y in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - x / y)
        # Of equally near grids the larger wins, unless it is more than twice the image.
        if distance < nearest or (distance == nearest and width * height > 0.5 * area * x * y):
            best, nearest = x * y, distance
    return best


def llava_onevision(width: int, height: int, preprocessor: Mapping[str, Any], config: Mapping[str, Any]) -> ImageLayout:
    """Layout for LLaVA-OneVision: a base view, then the tiled view with its padding cut off and a newline row a line.

    Every image of a request is tiled ("anyres"), as the processor does for a flat list of images.
    Source: `_get_number_of_features` of `processing_llava_onevision`, `pack_image_features` of the model.
    """
    size = preprocessor.get("size") or {"height": 384, "width": 384}
    tile_height = size.get("shortest_edge") or size["height"]
    tile_width = size.get("shortest_edge") or size["width"]
    best = _best_resolution(width, height, preprocessor.get("image_grid_pinpoints") or config["image_grid_pinpoints"])
    base = preprocessor["num_image_tokens"]
    side = math.isqrt(base)
    lines, columns = side * (best[0] // tile_height), side * (best[1] // tile_width)
    if width / height > columns / lines:
        lines -= (lines - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (lines / height), 7))) // 2 * 2
    aspect = preprocessor.get("vision_aspect_ratio") or config.get("vision_aspect_ratio", "anyres_max_9")
    ratio = math.sqrt(lines * columns / (int(aspect.removeprefix("anyres_max_")) * side**2))
    if ratio > 1.1:  # more rows than the model takes: the view is scaled down
        lines, columns = int(lines // ratio), int(columns // ratio)
    dropped = 1 if preprocessor.get("vision_feature_select_strategy") == "default" else 0  # the class token
    return ImageLayout("", (base + lines * columns + lines - dropped,), "")


def _best_resolution(width: int, height: int, resolutions: list[list[int]]) -> tuple[int, int]:
    """The (height, width) that keeps most of the image's pixels and wastes least. Source: `select_best_resolution`."""
    best, kept, wasted = (0, 0), 0, math.inf
    for tall, wide in resolutions:
        scale = min(wide / width, tall / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        waste = tall * wide - pixels
        if pixels > kept or (pixels == kept and waste < wasted):
            best, kept, wasted = (tall, wide), pixels, waste
    return best
