"""Pictures of coloured shapes for a generated task: a row of cells, each with one shape, a little moved and shaded."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import DataError

CELL = 16
"""Pixels of a cell, in height and width."""

COLOURS = {"red": (200, 40, 40), "green": (40, 170, 60), "blue": (50, 70, 210), "white": (235, 235, 235)}

Plane = NDArray[np.float64]
SHAPES: dict[str, Callable[[Plane, Plane], NDArray[np.bool_]]] = {
    "circle": lambda x, y: x**2 + y**2 <= 5.5**2,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) <= 5,
    "cross": lambda x, y: np.minimum(abs(x), abs(y)) <= 1.5,
    "bar": lambda x, y: (abs(y) <= 2) & (abs(x) <= 6.5),
}
"""Which pixels a shape covers; x and y count from its centre."""


def paint(shapes: Sequence[tuple[str, str]], below: Callable[[int], int]) -> bytes:
    """Return a PNG file.

    Args:
        shapes: (colour, shape) of each cell, from left to right.
        below: Gives an integer in [0, limit): how far a shape is moved, and how light it is.

    Raises:
        DataError: PIL is not installed.
    """
    image_module = _pil()
    pixels = np.full((CELL, CELL * len(shapes), 3), 20 + below(60), dtype=np.float64)
    rows, columns = np.mgrid[0:CELL, 0:CELL].astype(np.float64)
    for number, (colour, shape) in enumerate(shapes):
        x, y = columns - 7.5 + below(3) - 1, rows - 7.5 + below(3) - 1
        light = 0.8 + below(41) / 100
        cell = pixels[:, number * CELL : (number + 1) * CELL]
        cell[SHAPES[shape](x, y)] = np.minimum(255, np.array(COLOURS[colour]) * light)
    file = io.BytesIO()
    image_module.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def _pil() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("The task shapes draws pictures, which needs a package: pip install 'holdfast[vlm]'.") from None
    return Image
