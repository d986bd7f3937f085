"""Join what a model gets of images, and restore inputs whose images differ in more than one dimension.

All inputs of sequences are joined along dimension 0, in packs, requests and batches. Where a processor fills smaller
images up to the largest of a call (LLaVA-NeXT's tiles, Pixtral's pixels), an input is kept flat, [elements], with the
shapes of its images beside it, and filled up where the model is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SHAPES = "#shapes"
"""Ends the name of the shapes, [images, dimensions], of a flat input."""


def flattened(name: str, values: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return an image's input, [rows, ...], as a flat one."""
    shapes = np.asarray([values.shape[1:]] * len(values), dtype=np.int64)
    return {name: values.reshape(-1), f"{name}{_SHAPES}": shapes}


def array_arguments(inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
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
