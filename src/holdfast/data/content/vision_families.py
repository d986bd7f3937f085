"""What sets one family of models that see apart from the next: how images are written, counted and handed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

Inputs = Mapping[str, NDArray[Any]]
"""What the model gets of one image, by the name of its argument; images of a batch are joined along dimension 0."""


@dataclass(frozen=True)
class VideoFamily:
    """How one family writes videos. Its tower takes them as it takes images, with more than one frame in the grid."""

    placeholder: str = "<|vision_start|><|video_pad|><|vision_end|>"
    token: str = "<|video_pad|>"
    bounds_whole: bool = False
    """Whether bounds of pixels are for all frames together, and not for each."""
    in_seconds: bool = False
    """Whether positions on the axis of time go by the clock (`tokens_per_second`) and not by patches."""
    written_times: str = ""
    """What stands before each patch of frames, with the seconds in it; "" where nothing does."""


@dataclass(frozen=True)
class VisionFamily:
    """How one family writes and counts images."""

    placeholder: str
    """Stands for one image in plain text, as the family's chat template writes it."""
    image_token: str
    """The token in it that one token per feature takes the place of."""
    tokens: Callable[[Any, Any, Inputs], int]
    """(image processor, configuration, inputs of one image) -> how many tokens stand for it"""
    features: Callable[[Any, Inputs], int]
    """(configuration, inputs of one image) -> how many features the model makes of it"""
    inputs: tuple[str, ...] = ("pixel_values",)
    """Arguments of the model that the image processor makes."""
    token_types: str | None = None
    """The model's argument that tells image tokens from text where it computes positions itself."""
    turns_by_grid: bool = False
    """Whether positions of image tokens have three axes: time, row and column (M-RoPE, arXiv:2409.12191)."""
    rewrites: str = ""
    """What the family's chat template writes for an image, where upstream's processor puts more around it."""
    packs: bool = True
    """Whether image tokens see what stands before them and no more, as packed attention has it."""
    tiles: Callable[[int, int, int], str] | None = None
    """(rows, columns, tokens of a tile) -> the text that stands for an image cut into so many tiles, and the whole of
    it made small; 0 rows mean that it was not cut. None where an image is one piece."""
    takes_pixel_budget: bool = False
    """Whether the size an image is brought to depends on its own, between two bounds."""
    video: VideoFamily | None = None
    """None where videos are not known."""


def _grid_tokens(processor: Any, _: Any, inputs: Inputs) -> int:
    return int(inputs["image_grid_thw"].prod() // processor.merge_size**2)


def _grid_features(config: Any, inputs: Inputs) -> int:
    return int(inputs["image_grid_thw"].prod() // config.vision_config.spatial_merge_size**2)


_QWEN = VisionFamily(
    placeholder="<|vision_start|><|image_pad|><|vision_end|>",
    image_token="<|image_pad|>",
    tokens=_grid_tokens,
    features=_grid_features,
    inputs=("pixel_values", "image_grid_thw"),
    token_types="mm_token_type_ids",
    turns_by_grid=True,
    takes_pixel_budget=True,
    video=VideoFamily(),
)
_QWEN_SECONDS = replace(_QWEN, video=VideoFamily(in_seconds=True))
_QWEN_WRITTEN = replace(_QWEN, video=VideoFamily(bounds_whole=True, written_times="<{:.1f} seconds>"))


def _square_features(config: Any, inputs: Inputs) -> int:
    """Count the patches, with or without the one that stands for the whole image."""
    vision = config.vision_config
    height, width = inputs["pixel_values"].shape[-2:]
    has_class = int("clip" in vision.model_type)
    extra = has_class if config.vision_feature_select_strategy == "full" else has_class - 1
    return int((height // vision.patch_size) * (width // vision.patch_size) + extra)


_LLAVA = VisionFamily(
    placeholder="<image>",
    image_token="<image>",
    tokens=lambda _, config, inputs: _square_features(config, inputs),
    features=_square_features,
)

_GEMMA3 = VisionFamily(
    placeholder="\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
    image_token="<image_soft_token>",
    tokens=lambda _, config, __: int(config.mm_tokens_per_image),
    features=lambda config, inputs: int(config.mm_tokens_per_image * len(inputs["pixel_values"])),
    token_types="token_type_ids",
    rewrites="<start_of_image>",
    packs=False,
)


def _tile_tokens(_: Any, config: Any, inputs: Inputs) -> int:
    side = config.vision_config.image_size // config.vision_config.patch_size
    return int(len(inputs["pixel_values"]) * side**2 // config.scale_factor**2)


def _tile_features(config: Any, inputs: Inputs) -> int:
    count, _, _, height, width = inputs["pixel_values"].shape
    patch = config.vision_config.patch_size
    return int(count * ((height // patch) * (width // patch) // config.scale_factor**2))


def _tile_text(rows: int, columns: int, tokens: int) -> str:
    """Write an image the way Idefics3 was trained to read it: tiles by row, each named, then the whole."""
    mark, image = "<fake_token_around_image>", "<image>" * tokens
    whole = f"{mark}<global-img>{image}{mark}"
    if rows == 0:
        return whole
    tiles = [[f"{mark}<row_{row + 1}_col_{column + 1}>{image}" for column in range(columns)] for row in range(rows)]
    return "".join(f"{''.join(line)}\n" for line in tiles) + f"\n{whole}"


_IDEFICS3 = VisionFamily(
    placeholder="<image>",
    image_token="<image>",
    tokens=_tile_tokens,
    features=_tile_features,
    inputs=("pixel_values", "pixel_attention_mask"),
    tiles=_tile_text,
)

VISION_FAMILIES: Mapping[str, VisionFamily] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN_SECONDS,
    "qwen3_vl": _QWEN_WRITTEN,
    "qwen3_vl_moe": _QWEN_WRITTEN,
    "llava": _LLAVA,
    "gemma3": _GEMMA3,
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
}
"""By transformers' model_type."""


def video_token(family: VisionFamily, config: Any) -> int | None:
    """Return the id that a model's configuration marks videos by; None where it knows none."""
    return None if family.video is None else getattr(config, "video_token_id", None)
