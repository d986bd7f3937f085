"""What a model gets of images beside tokens: joined inputs, and positions on grids.

All inputs of sequences are joined along dimension 0, in packs, requests and batches. Where a processor fills smaller
images up to the largest of a call (LLaVA-NeXT's tiles, Pixtral's pixels), an input is kept flat, [elements], with the
shapes of its images beside it, and filled up where the model is called.

Positions of tokens whose images lie on grids have three axes: time, row and column (M-RoPE, arXiv:2409.12191).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.data.content.lengths import Grid, ImageSpan

Inputs = Mapping[str, NDArray[Any]]
"""What the model gets of one image, by the name of its argument; images of a batch are joined along dimension 0."""


@dataclass(frozen=True)
class PreparedImage:
    """One image or video, ready for the model."""

    tokens: tuple[int, ...]
    """What stands in the place of its placeholder: image tokens, and between tiles or frames what tells them apart."""
    inputs: Inputs
    grids: tuple[Grid, ...] = ()
    """Grids of a video; empty for an image."""


_SHAPES = "#shapes"
"""Ends the name of the shapes, [images, dimensions], of a flat input."""


def flattened(name: str, values: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return an image's input, [rows, ...], as a flat one."""
    shapes = np.asarray([values.shape[1:]] * len(values), dtype=np.int64)
    return {name: values.reshape(-1), f"{name}{_SHAPES}": shapes}


def array_arguments(inputs: Inputs) -> dict[str, NDArray[Any]]:
    """Return what the model is called with for joined inputs of any number of images."""
    return _arguments(inputs, lambda shape, like: np.zeros(shape, like.dtype))


def tensor_arguments(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the model is called with, of tensors; rewards and commands import this module without torch."""
    return _arguments(inputs, lambda shape, like: like.new_zeros(shape))


def _arguments(inputs: Mapping[str, Any], zeros: Callable[[Sequence[int], Any], Any]) -> dict[str, Any]:
    arguments = {}
    for name, values in inputs.items():
        shapes = inputs.get(f"{name}{_SHAPES}")
        if not name.endswith(_SHAPES):
            arguments[name] = values if shapes is None else _restored(values, shapes.tolist(), zeros)
    return arguments


def _restored(values: Any, shapes: list[list[int]], zeros: Callable[[Sequence[int], Any], Any]) -> Any:
    restored = zeros((len(shapes), *(max(sizes) for sizes in zip(*shapes, strict=True))), values)
    start = 0
    for number, shape in enumerate(shapes):
        end = start + math.prod(shape)
        restored[(number, *(slice(0, size) for size in shape))] = values[start:end].reshape(shape)
        start = end
    return restored


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
