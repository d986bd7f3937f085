"""Vision models: the modules of the vision tower, attention settings, and the image processor."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from holdfast.config.sections.data import TextConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.data.tokens.processor import NoImageRules, may_see
from holdfast.data.tokens.videos import VideoOptions
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import ModelError
from holdfast.files import read_json
from holdfast.models.files.processors import PROCESSOR_FILES, NoProcessor, whole_processor
from holdfast.models.names import canonical_name

VIDEO_FILE = "video_preprocessor_config.json"

FREEZE_PRESETS: Mapping[str, str] = {
    "vision_tower": r"^(model\.)?(visual\.(?!merger\.|deepstack_merger_list\.)|vision_tower\.|vision_model\.)",
    "projector": r"^(model\.)?(visual\.(merger|deepstack_merger_list)\.|multi_modal_projector\.|connector\.|"
    r"embed_vision\.|language_projection\.|qformer\.|query_tokens$)",
    "language_model": r"^((model\.)?(language_model|text_model)\.|lm_head\.)",
}
"""Presets of `model.freeze` as patterns of canonical names. The preset `embeddings` is resolved in the model itself."""

_CAST_TO_STORAGE = ("idefics3", "smolvlm")
"""Families whose model casts pixel values to the storage dtype of its parameters."""

_OTHER_POSITIONS = ("hunyuan_vl",)
"""Families whose configuration reads like that of M-RoPE, with axes of another meaning."""

_TOWER = re.compile(r"(model\.)?(visual|vision_tower|vision_model|audio_tower|qformer)")


def towers_of(model: nn.Module) -> list[str]:
    """Return the paths of the modules that only see images; a batch without images does not run them."""
    paths = [canonical_name(path) for path, _ in model.named_modules()]
    return [path for path in paths if _TOWER.fullmatch(path)]


def follow_compute_dtype(model: Any) -> None:
    """Let Idefics3 and SmolVLM compute in another dtype than the storage dtype, as mixed precision of FSDP2 needs.

    These models cast pixel values and image features to `model.dtype`, which is the dtype of the first parameter: a
    shard in storage dtype. The property is replaced by the dtype of the input embeddings, which are gathered in the
    compute dtype while the root runs.
    """
    if model.config.model_type not in _CAST_TO_STORAGE:
        return
    inner = model.base_model
    kind = type(inner)
    # Of the same printed name, by which transformers finds what a class can record.
    attributes = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    dtype = property(lambda module: module.get_input_embeddings().weight.dtype)
    inner.__class__ = type(kind.__name__, (kind,), {**attributes, "dtype": dtype})


def set_attention(model: Any, name: str) -> None:
    """Set how the language model attends; a tower beside it keeps transformers' own."""
    config = model.config
    text = config.get_text_config()
    keys = [key for key in getattr(config, "sub_configs", {}) if getattr(config, key, None) is text]
    model.set_attn_implementation(name if text is config or not keys else {"": name, **dict.fromkeys(keys, name)})


def load_image_processor(config: ModelConfig, raw_config: Any, directories: list[Path]) -> Any:
    """Return transformers' image processor that needs PIL alone; None for a model that reads text alone.

    Args:
        config: Its `image_processor` holds settings for a random start.
        raw_config: The model's configuration.
        directories: Where a processor's file may lie.

    Raises:
        ModelError: There is a file, and transformers cannot read it.
    """
    if not may_see(raw_config):
        if config.image_processor is not None:
            raise ModelError(
                f"model.image_processor is set, but {raw_config.model_type} has no vision tower, or no image token."
            )
        return None
    settings, origin = config.image_processor, "model.image_processor"
    for directory in directories if settings is None else []:
        for name in PROCESSOR_FILES:
            if settings is None and (directory / name).exists():
                settings, origin = _settings_in(directory / name), str(directory / name)
    return None if settings is None else _processor_of(settings, raw_config.model_type, origin)


def _settings_in(file: Path) -> dict[str, Any] | None:
    """Return the image processor's settings; newer files hold them inside those of the whole processor."""
    try:
        values = read_json(file)
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}.") from None
    settings: dict[str, Any] | None = values.get("image_processor", values)
    is_processor_file = file.name in {PROCESSOR_FILES[0], VIDEO_FILE}
    return settings if settings and ("image_processor_type" in settings or is_processor_file) else None


def _processor_of(settings: Mapping[str, Any], model_type: str, origin: str) -> Any:
    import transformers

    class_name = settings.get("image_processor_type") or _usual_class(model_type)
    name = str(class_name).removesuffix("Fast").removesuffix("Pil")
    # transformers 5 has two classes for each: one for torchvision, and one that needs PIL alone.
    for candidate in (f"{name}Pil", name):
        processor_class = getattr(transformers, candidate, None)
        if processor_class is not None and not getattr(processor_class, "is_dummy", False):
            try:
                return processor_class.from_dict(copy.deepcopy(dict(settings)))
            except (TypeError, ValueError, KeyError) as error:
                raise ModelError(f"{origin} does not make a {candidate}: {error}.") from error
    if hasattr(transformers, name) and not hasattr(transformers, f"{name}Pil"):
        return None  # it needs torchvision; `image_side` says so
    raise ModelError(
        f"{origin} names the image processor {class_name}, which transformers does not have here. Install pillow."
    )


def _usual_class(model_type: str) -> str:
    """Return the image processor's class of a family, for files that do not name one."""
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    names = dict(IMAGE_PROCESSOR_MAPPING_NAMES).get(model_type) or {}
    return str(names.get("pil") or names.get("torchvision") or "Qwen2VLImageProcessor")


def _needs_torchvision(model_type: str) -> bool:
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    names = dict(IMAGE_PROCESSOR_MAPPING_NAMES).get(model_type)
    return names is not None and "pil" not in names


def image_side(  # noqa: PLR0913 - a model's parts, and a run's bounds
    processor: Any,
    tokenizer: Any,
    config: Any,
    *,
    settings: Mapping[str, Any] = MappingProxyType({}),
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    videos: VideoOptions | None = None,
) -> ImageSide | str:
    """Return what turns images into tokens, or a sentence that says why there is none.

    Args:
        processor: The image processor.
        tokenizer: The model's.
        config: The model's.
        settings: Arguments of the whole processor that the model's files have.
        min_pixels, max_pixels: Bounds of `data`.
        videos: What holds for videos.

    Raises:
        ModelError: Processor, tokenizer and model do not belong together.
    """
    if not may_see(config):
        return f"{config.model_type} reads text alone, or its images are not known here"
    if config.model_type in _OTHER_POSITIONS:
        return (
            f"Images of {config.model_type} cannot be trained on: positions of image tokens are column, row and number "
            "of the image, a rule that is not followed here"
        )
    if processor is None and _needs_torchvision(config.model_type):
        return f"transformers' {_usual_class(config.model_type)} needs torchvision, which is not used here"
    if processor is None:
        return (
            f"The directory of the {config.model_type} model has no {PROCESSOR_FILES[0]}, which says how images become "
            "patches"
        )
    try:
        whole = whole_processor(processor, tokenizer, config, settings)
        return ImageSide(whole, tokenizer, config, min_pixels=min_pixels, max_pixels=max_pixels, videos=videos)
    except (NoProcessor, NoImageRules) as error:
        return f"Images of {config.model_type} cannot be trained on: {error}"


def video_options(text: TextConfig, directory: Path | None) -> VideoOptions:
    """Return what holds for videos: the section's words, and sizes from the model's own file for videos.

    Raises:
        ModelError: There is such a file, and it is not JSON.
    """
    file = None if directory is None else directory / VIDEO_FILE
    size = (_settings_in(file) or {}).get("size") if file is not None and file.exists() else None
    has_both_edges = isinstance(size, Mapping) and {"shortest_edge", "longest_edge"} <= size.keys()
    return VideoOptions(text.video_fps, text.video_min_pixels, text.video_max_pixels, size if has_both_edges else None)
