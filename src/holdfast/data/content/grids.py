"""Positions of tokens whose images lie on grids of time, row and column (M-RoPE, arXiv:2409.12191)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.data.content.lengths import Grid, ImageSpan


def grid_positions(length: int, images: Sequence[ImageSpan], merge: int) -> NDArray[np.int64]:
    """Return [3, L] positions: time, row and column for image tokens, three equal numbers for text.

    An image of h x w features begins at the position p that a text token would have had: its features are at
    (p, p + row, p + column), and what follows it goes on at p + max(h, w). So is each frame of a video; where those
    lie side by side, frame f is at p + floor(f * interval) on the first axis.
    """
    blocks: list[NDArray[np.int64]] = []
    end = position = 0
    for span in images:
        for grid in span.grids or (_grid_of(span, merge),):
            start = span.start + grid.offset
            text = np.arange(position, position + start - end)
            blocks.append(np.broadcast_to(text, (3, text.size)))
            position += text.size
            block = np.indices((grid.frames, grid.rows, grid.columns)).reshape(3, -1)
            # transformers multiplies in float32, and so decides whether 2.9999 becomes 2 or 3.
            block[0] = (block[0].astype(np.float32) * np.float32(grid.interval)).astype(np.int64)
            blocks.append(block + position)
            position += max(grid.rows, grid.columns)
            end = start + block.shape[1]
    tail = np.arange(position, position + length - end)
    return np.concatenate([*blocks, np.broadcast_to(tail, (3, tail.size))], axis=1).astype(np.int64)


def _grid_of(span: ImageSpan, merge: int) -> Grid:
    frames, height, width = (int(size) for size in span.inputs["image_grid_thw"][0])
    return Grid(0, frames, height // merge, width // merge, 1.0)


def going_on(positions: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return [A, L + count] positions: those given, [A, L], and those of `count` tokens of text after them."""
    after = positions.max(initial=-1) + 1 + np.arange(count)
    return np.concatenate([positions, np.broadcast_to(after, (len(positions), count))], axis=1)
