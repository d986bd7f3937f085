"""Image processors and configurations with the sizes of released models; all else is tiny, and there are no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from holdfast.config.sections.model import ModelConfig
from holdfast.data.tasks.synthetic import character_tokenizer, picture_tokenizer
from holdfast.models.files.vision import load_image_processor
from tests.vision import MARKS, config_values
from tests.vision_derived import KINDS, derived_config, derived_tokenizer


@dataclass(frozen=True)
class Sizes:
    """What a released model has and the tests' tiny one has not."""

    pixels: Mapping[str, Any]
    """Of the image processor."""
    tower: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the whole processor."""


_QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "temporal_patch_size": 2, "merge_size": 2}
_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
FAMILIES = {
    "qwen2_5_vl": Sizes(
        {**_QWEN, "patch_size": 14, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}},
        {"patch_size": 14},
    ),
    "qwen3_5": Sizes(
        {**_QWEN, "patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}, {"patch_size": 16}
    ),
    "gemma4": Sizes(
        {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 16, "pooling_kernel_size": 3}
        | {"max_soft_tokens": 280},
        {"patch_size": 16, "pooling_kernel_size": 3},
    ),
    "internvl": Sizes(
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 448, "width": 448}}
        | {"crop_to_patches": True, "max_patches": 12},
        {"image_size": [448, 448], "patch_size": [14, 14]},
        {"image_seq_length": 256},
        {"image_seq_length": 256},
    ),
    "llava_next": Sizes(
        {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 336}}
        | {"crop_size": {"height": 336, "width": 336}, "image_grid_pinpoints": _PINPOINTS},
        {"image_size": 336, "patch_size": 14},
        {"image_grid_pinpoints": _PINPOINTS},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "smolvlm": Sizes(
        {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 2048}}
        | {"max_image_size": {"longest_edge": 512}},
        {"image_size": 512, "patch_size": 16},
        {"scale_factor": 4},
    ),
}


def parts(kind: str, folder: Path) -> tuple[Any, Any, Any]:
    """Return a family's image processor, tokenizer and configuration."""
    if kind in KINDS:
        tokenizer = derived_tokenizer(kind, folder)
        values = derived_config(kind, tokenizer)
    else:
        values = config_values(kind)
        tiles = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
        marks = dict.fromkeys([*MARKS["smolvlm"], *tiles])
        tokenizer = character_tokenizer(tuple(marks)) if kind == "smolvlm" else picture_tokenizer()
        if kind == "smolvlm":
            values["image_token_id"] = tokenizer.convert_tokens_to_ids("<image>")
    sizes = FAMILIES[kind]
    values = {**values, **sizes.config, "vision_config": {**values["vision_config"], **sizes.tower}}
    config = AutoConfig.for_model(**values)
    section = ModelConfig(config=values, tokenizer="x", image_processor=dict(sizes.pixels))
    return load_image_processor(section, config, []), tokenizer, config
