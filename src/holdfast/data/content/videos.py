"""Videos in rows, as lists of frames or as files, and the conversion of frames to patches.

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

_KEYS = ("frames", "bytes", "path")
"""Of a mapping; `datasets` stores films with the last two."""

_UNREAD = {
    *("video_start", "video_end", "nframes", "min_frames", "max_frames"),
    *("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width"),
}
"""Keys by which qwen-vl-utils would choose other frames or sizes."""

_WIDEST = 200
"""Sides of a frame may differ by this factor, as transformers has it."""


@dataclass(frozen=True)
class Video:
    """One video of a row."""

    frames: tuple[Any, ...]
    """Each what an image is: a path, the bytes of a file, a PIL image. None for a film."""
    fps: float | None
    """Frames of a second that are in the list, or that are taken of a film; None: what `data.video_fps` says."""
    original: Any
    """As the row has it, by which two contents of a row know that they share it."""
    film: str | bytes | Path | None = None
    """A file to decode, or its bytes."""


@dataclass(frozen=True)
class VideoOptions:
    """Options for videos from the run's configuration and the model's files."""

    fps: float = 2.0
    min_pixels: int | None = None
    max_pixels: int | None = None
    size: Mapping[str, int] | None = None
    """Bounds in pixels (`shortest_edge`, `longest_edge`) of the model's own file; None: those of its images."""


def video_of(content: Any, video_name: str, fps: Any = None) -> Video:
    """Return a video as a row holds it.

    Args:
        content: A list of frames, or a mapping with `frames`; the path of a film, its bytes, or a mapping with `bytes`
            or `path`. A mapping may have `fps`.
        video_name: What an error calls it.
        fps: Where `content` has none.

    Raises:
        DataError: It is none of these, or empty, its rate is not a number above 0, or as `refuse_unread`.
    """
    frames = content
    if isinstance(content, Mapping):
        refuse_unread(content, video_name)
        frames = next((content[key] for key in _KEYS if content.get(key) is not None), None)
        fps = content.get("fps", fps)
    is_film = isinstance(frames, str | bytes | Path)
    if not is_film and not isinstance(frames, Sequence):
        raise DataError(
            f"{video_name} is a {type(content).__name__}; a video is a list of frames, or a film: the path of a file, "
            "or its bytes."
        )
    if not is_film and not len(frames):
        raise DataError(f"{video_name} has no frames. Remove it and its place in the text.")
    rate = _rate_of(fps, video_name)
    return Video((), rate, content, frames) if is_film else Video(tuple(frames), rate, content)


def refuse_unread(keys: Mapping[str, Any], video_name: str) -> None:
    """Raise where a row says of a video what is not followed.

    Raises:
        DataError: It has a key that would change which frames are taken, or their size.
    """
    unread = [key for key in keys if key in _UNREAD and keys[key] is not None]
    if unread:
        raise DataError(
            f"{video_name}: {', '.join(unread)} of a video are not read. Cut the file, or set data.max_frames, "
            "data.video_fps or the bounds of pixels (data.video_min_pixels, data.video_max_pixels)."
        )


def _rate_of(fps: Any, video_name: str) -> float | None:
    if fps is None:
        return None
    if isinstance(fps, bool) or not (isinstance(fps, int | float) and 0 < fps < 1e9):
        raise DataError(f"{video_name} has fps={fps!r}; it is the number of its frames that belong to one second.")
    return float(fps)


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
