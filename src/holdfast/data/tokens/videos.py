"""Turn the frames of a video into tokens and model inputs, for the Qwen-VL families.

transformers' video processors need torchvision, so that they cannot be asked as those of images are. They resize all
frames to one size within bounds, and cut patches that extend over neighbouring frames; this module does the same with
the family's image processor. The tower takes videos as it takes images, with more than one frame in the grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.data.content.images import Frames
from holdfast.data.content.lengths import Grid
from holdfast.data.content.model_inputs import Inputs, PreparedImage
from holdfast.data.tokens.processor import GRID, ModelProcessor
from holdfast.errors import DataError

_WIDEST = 200
"""Sides of a frame may differ by this factor, as transformers has it."""


@dataclass(frozen=True)
class VideoFamily:
    """How one family writes videos."""

    placeholder: str = "<|vision_start|><|video_pad|><|vision_end|>"
    token: str = "<|video_pad|>"
    bounds_whole: bool = False
    """Whether bounds of pixels are for all frames together, and not for each."""
    in_seconds: bool = False
    """Whether positions on the axis of time go by the clock (`tokens_per_second`) and not by patches."""
    written_times: str = ""
    """What stands before each patch of frames, with the seconds in it; "" where nothing does."""


_WITH_TIMES = VideoFamily(bounds_whole=True, written_times="<{:.1f} seconds>")
VIDEO_FAMILIES: Mapping[str, VideoFamily] = {
    "qwen2_vl": VideoFamily(),
    "qwen2_5_vl": VideoFamily(in_seconds=True),
    "qwen3_vl": _WITH_TIMES,
    "qwen3_vl_moe": _WITH_TIMES,
}
"""By transformers' model_type; other families are trained on no videos."""


@dataclass(frozen=True)
class VideoOptions:
    """Options for videos from the run's configuration and the model's files."""

    fps: float = 2.0
    min_pixels: int | None = None
    max_pixels: int | None = None
    size: Mapping[str, int] | None = None
    """Bounds in pixels (`shortest_edge`, `longest_edge`) of the model's own file; None: those of its images."""


def video_token(config: Any) -> int | None:
    """Return the id that a model's configuration marks videos by; None where the family's videos are not known."""
    return getattr(config, "video_token_id", None) if str(config.model_type) in VIDEO_FAMILIES else None


@dataclass(frozen=True)
class VideoSide:
    """Turns frames into tokens and model inputs."""

    family: VideoFamily
    token_id: int
    """The token at which the model puts features of videos."""
    _asked: ModelProcessor
    _options: VideoOptions

    def prepare(self, frames: Frames, video_name: str) -> PreparedImage:
        """Return the tokens and inputs of one video.

        Raises:
            DataError: Its frames differ in size, or have one that the model does not take.
        """
        sizes = sorted({(frame.width, frame.height) for frame in frames.images})
        if len(sizes) > 1:
            (first_size, second_size) = (f"{width}x{height}" for width, height in sizes[:2])
            raise DataError(
                f"{video_name} has frames of {first_size} and of {second_size} pixels. Bring all of them to one size."
            )
        processor = self._asked.upstream.image_processor
        unit = processor.patch_size * processor.merge_size
        try:
            size = frame_size(self.family, len(frames.images), *sizes[0], unit, self._bounds(processor))
        except ValueError as error:
            raise DataError(f"{video_name} of {sizes[0][0]}x{sizes[0][1]} pixels: {error}.") from None
        inputs = patches_of(frames.images, processor, size)
        tokens, grids = self._tokens(inputs, frames)
        return PreparedImage(tokens, inputs, grids)

    def _tokens(self, inputs: Inputs, frames: Frames) -> tuple[tuple[int, ...], tuple[Grid, ...]]:
        """Return what stands for a video, and where the features in it lie."""
        processor = self._asked.upstream.image_processor
        merge, span = processor.merge_size, processor.temporal_patch_size
        count, rows, columns = (int(side) for side in inputs[GRID][0] // [1, merge, merge])
        if not self.family.written_times:
            by_clock = self.family.in_seconds
            pace = self._asked.config.vision_config.tokens_per_second * span / frames.fps if by_clock else 1.0
            return (self.token_id,) * (count * rows * columns), (Grid(0, count, rows, columns, pace),)
        written = self.family.placeholder.replace(self.family.token, self.family.token * (rows * columns))
        times = seconds_of(len(frames.images), frames.fps, span)
        tokens = tuple(self._asked.ids("".join(self.family.written_times.format(time) + written for time in times)))
        starts = [index for index, token in enumerate(tokens) if token == self.token_id][:: rows * columns]
        return tokens, tuple(Grid(start, 1, rows, columns, 1.0) for start in starts)

    def _bounds(self, processor: Any) -> tuple[int, int]:
        options = self._options
        size = dict(processor.size) if options.size is None else options.size
        low = size["shortest_edge"] if options.min_pixels is None else options.min_pixels
        return low, size["longest_edge"] if options.max_pixels is None else options.max_pixels


def video_side(asked: ModelProcessor, options: VideoOptions) -> VideoSide | str:
    """Return what turns frames into tokens, or a clause that says why no row may have a video."""
    family = VIDEO_FAMILIES.get(asked.name)
    if family is None:
        return f"{asked.name} is trained on text and images, and on no videos"
    token = asked.tokenizer.convert_tokens_to_ids(family.token)
    if token is None or token != video_token(asked.config):
        return f"the tokenizer has no {family.token} with the id that the model marks videos by"
    return VideoSide(family, token, asked, options)


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
        GRID: np.asarray([grid], dtype=np.int64),
    }


def seconds_of(count: int, fps: float, span: int) -> list[float]:
    """Return the time of each patch of `span` frames: the middle between its first frame and its last."""
    numbers = [*range(count), *[count - 1] * (-count % span)]
    return [(numbers[start] / fps + numbers[start + span - 1] / fps) / 2 for start in range(0, len(numbers), span)]
