"""Videos as lists of frames in rows, and their conversion to patches.

transformers' video processors need torchvision. They resize all frames to one size within bounds, and cut patches that
extend over neighbouring frames; this module does the same with the family's image processor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.data.content.vision_families import VideoFamily
from holdfast.errors import DataError

_WIDEST = 200
"""Sides of a frame may differ by this factor, as transformers has it."""


@dataclass(frozen=True)
class Video:
    """One video of a row."""

    frames: tuple[Any, ...]
    """Each what an image is: a path, the bytes of a file, a PIL image."""
    fps: float | None
    """Frames of a second that are in the list; None: what `data.video_fps` says."""
    original: Any
    """As the row has it, by which two contents of a row know that they share it."""


@dataclass(frozen=True)
class VideoOptions:
    """Options for videos from the run's configuration and the model's files."""

    fps: float = 2.0
    min_pixels: int | None = None
    max_pixels: int | None = None
    size: Mapping[str, int] | None = None
    """Bounds in pixels (`shortest_edge`, `longest_edge`) of the model's own file; None: those of its images."""


def video_of(content: Any, video_name: str, fps: Any = None) -> Video:
    """Return a video as a row holds it: a list of frames, or a mapping with `frames` and perhaps `fps`.

    Raises:
        DataError: It is a file of a video, or empty, or its rate is not a number above 0.
    """
    frames = content
    if isinstance(content, Mapping):
        frames, fps = content.get("frames"), content.get("fps", fps)
    if isinstance(frames, str | bytes | Path) or not isinstance(frames, Sequence):
        description = f"{len(frames)} bytes" if isinstance(frames, bytes) else f"{frames!s:.80}"
        raise DataError(
            f"{video_name} is {description}; a video is a list of frames, and files of videos are not opened. Write "
            "the frames as images, as in `ffmpeg -i clip.mp4 -vf fps=2 clip/%04d.png`, and name them in a list."
        )
    if not len(frames):
        raise DataError(f"{video_name} has no frames. Remove it and its place in the text.")
    if fps is not None and not (isinstance(fps, int | float) and math.isfinite(fps) and fps > 0):
        raise DataError(f"{video_name} has fps={fps!r}; it is the number of its frames that belong to one second.")
    return Video(tuple(frames), None if fps is None else float(fps), content)


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
