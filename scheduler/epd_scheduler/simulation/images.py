"""Encoder units of an image, by the arithmetic of the model families; what the placeholders add is left out."""

from __future__ import annotations

import math

import msgspec


class Grid(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="grid"):
    """Qwen2-VL: the image as it is, a row for each square of `side` pixels; one unit an image."""

    side: int = 28
    least: int = 4  # rows; smaller images are enlarged
    most: int = 16384  # rows; larger images are reduced

    def units(self, width: int, height: int) -> tuple[int, ...]:
        """Embedding rows of each unit."""
        columns, lines = max(1, round(width / self.side)), max(1, round(height / self.side))
        if columns * lines > self.most or columns * lines < self.least:
            wanted = self.most if columns * lines > self.most else self.least
            scale = math.sqrt(wanted * self.side**2 / (width * height))
            rounding = math.floor if wanted == self.most else math.ceil
            columns = max(1, rounding(width * scale / self.side))
            lines = max(1, rounding(height * scale / self.side))
        return (columns * lines,)


class Tiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tiles"):
    """InternVL, MiniCPM-V: square tiles of `side` pixels, each a unit of `rows`, and one of the whole image."""

    rows: int
    most: int  # tiles
    side: int = 448

    def units(self, width: int, height: int) -> tuple[int, ...]:
        """Embedding rows of each unit."""
        wanted = min(self.most, math.ceil(width * height / self.side**2))
        tiles = _best_grid(width / height, wanted, self.most)
        return (self.rows,) * (tiles + 1 if tiles > 1 else 1)


Vision = Grid | Tiles


def _best_grid(aspect: float, wanted: int, most: int) -> int:
    """Tiles of the grid nearest in shape to the image, with about as many tiles as its area asks for."""
    grids = [
        (columns, count // columns)
        for count in {wanted - 1, wanted, wanted + 1} & set(range(1, most + 1))
        for columns in range(1, count + 1)
        if count % columns == 0
    ]
    columns, lines = min(grids, key=lambda grid: (abs(math.log(aspect * grid[1] / grid[0])), -grid[0] * grid[1]))
    return columns * lines
