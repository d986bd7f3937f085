"""The frames of a video as patches.

transformers' video processors need torchvision. They resize all frames to one size within bounds, and cut patches that
extend over neighbouring frames; this module does the same with the family's image processor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.data.content.vision_families import VideoFamily

_WIDEST = 200
"""Sides of a frame may differ by this factor, as transformers has it."""


@dataclass(frozen=True)
class VideoOptions:
    """Options for videos from the run's configuration and the model's files."""

    fps: float = 2.0
    min_pixels: int | None = None
    max_pixels: int | None = None
    size: Mapping[str, int] | None = None
    """Bounds in pixels (`shortest_edge`, `longest_edge`) of the model's own file; None: those of its images."""


def frame_size(family: VideoFamily, count: int, width: int, height: int, unit: int, bounds: tuple[int, int]) -> Any:
    """Return (height, width) that frames are brought to: multiples of `unit` pixels within bounds.

    Args:
        family: Says whether bounds are a frame's or those of all frames together.
        count: How many frames there are.
        width, height: Of each.
        unit: Pixels of a token on one side.
        bounds: Fewest and most pixels.

    Raises:
        ValueError: The frames are too narrow, or too few for bounds of all of them together.
    """
    low, high = bounds
    frames, counted_frames = 1, 1
    if family.bounds_whole:
        if count < 2:
            raise ValueError("it has 1 frame, and the model takes 2 or more")
        frames, counted_frames = count, 2 * round(count / 2)
        if min(height, width) < unit:
            scale = unit / min(height, width)
            height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > _WIDEST:
        raise ValueError(f"its sides differ by more than a factor of {_WIDEST}")
    rows, columns = round(height / unit), round(width / unit)
    pixels = counted_frames * rows * columns * unit**2
    if pixels > high:
        shrink = math.sqrt(frames * height * width / high)
        rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
    elif pixels < low:
        grow = math.sqrt(low / (frames * height * width))
        rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
    return rows * unit, columns * unit


def patches_of(frames: Sequence[Any], processor: Any, size: tuple[int, int]) -> dict[str, NDArray[Any]]:
    """Return the tower's inputs of PIL frames: pixels of patches over `temporal_patch_size` frames each, and the grid.

    Where frames are left over, the last one is repeated.
    """
    height, width = size
    span, side = processor.temporal_patch_size, processor.patch_size
    resized = [frame.resize((width, height), resample=processor.resample) for frame in frames]
    resized += [resized[-1]] * (-len(resized) % span)
    processed = processor(images=resized, return_tensors="np", do_resize=False)
    # An image stands in its patches as often as they reach over frames: [frames, patches, channels, span, side, side].
    pixels = np.asarray(processed["pixel_values"])
    patches = pixels.reshape(len(resized), -1, 3, span, side, side)[:, :, :, 0]
    joined = patches.reshape(len(resized) // span, span, *patches.shape[1:]).transpose(0, 2, 3, 1, 4, 5)
    grid = [len(resized) // span, height // side, width // side]
    return {
        "pixel_values": np.ascontiguousarray(joined).reshape(-1, pixels.shape[-1]),
        "image_grid_thw": np.asarray([grid], dtype=np.int64),
    }


def seconds_of(count: int, fps: float, span: int) -> list[float]:
    """Return the time of each patch of `span` frames: the middle between its first frame and its last."""
    numbers = [*range(count), *[count - 1] * (-count % span)]
    return [(numbers[start] / fps + numbers[start + span - 1] / fps) / 2 for start in range(0, len(numbers), span)]
