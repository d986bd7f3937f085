"""Tiny models of families that are known by their processors alone, with all the files of a directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoTokenizer

from holdfast.config.sections.model import ModelConfig
from holdfast.data.tasks.synthetic import character_tokenizer, picture_tokenizer
from holdfast.data.tokens.vision import ImageSide
from holdfast.models.files.origin import load_tokenizer
from holdfast.models.files.processors import processor_settings, whole_processor
from holdfast.models.files.vision import image_side, load_image_processor
from tests.tiny import COMMON
from tests.vision import PATCH, PROCESSORS
from tests.vision import config_values as table_values

_TILES: dict[str, Any] = {"size": {"height": 16, "width": 16}, "crop_to_patches": True, "max_patches": 4}
_PINPOINTS = [[16, 32], [32, 16], [32, 32]]
_SQUARES: dict[str, Any] = {
    "size": {"shortest_edge": 16},
    "crop_size": {"height": 16, "width": 16},
    "image_grid_pinpoints": _PINPOINTS,
}
_CLIP = table_values("llava")["vision_config"]
_SIGLIP = table_values("gemma3")["vision_config"]
_QWEN_TOWER = table_values("qwen3_vl")["vision_config"]
_ROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_GLM_ROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
_QWEN3_5 = {
    "head_dim": 8,
    "rope_parameters": _ROPE | {"partial_rotary_factor": 1.0},
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_QWEN_TOKENS = {"image_token_id": "<|image_pad|>", "vision_start_token_id": "<|vision_start|>"} | {
    "vision_end_token_id": "<|vision_end|>"
}


_QWEN3_5_TOWER = {name: value for name, value in _QWEN_TOWER.items() if name != "deepstack_visual_indexes"}
_PIXTRAL_TOWER = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 48,
    "patch_size": PATCH,
}
_PIXTRAL_PIXELS = {
    "image_processor_type": "PixtralImageProcessor",
    "size": {"longest_edge": 48},
    "patch_size": {"height": PATCH, "width": PATCH},
}


class Kind(NamedTuple):
    """What a tiny model of one family is made of."""

    text: Mapping[str, Any]
    tower: Mapping[str, Any]
    image_processor: Mapping[str, Any]
    marks: tuple[str, ...]
    """Special tokens; the first is what a template writes for an image, unless `written` says more."""
    ids: Mapping[str, str | tuple[str, ...]]
    """Tokens, by the field of the configuration that has their id, or ids."""
    roles: Mapping[str, str] = {}
    """Tokens that the tokenizer knows by name."""
    config: Mapping[str, Any] = {}
    processor: Mapping[str, Any] = {}
    """Settings of the whole processor."""
    written: str = ""


def _glm(kind: str) -> Kind:
    marks = ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>", "<|begin_of_video|>")
    return Kind(
        {"model_type": "glm4v_text", "rope_parameters": _GLM_ROPE},
        {
            "model_type": "glm4v_vision",
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "image_size": 16,
            "patch_size": PATCH,
            "out_hidden_size": 32,
        },
        {"image_processor_type": f"{kind.capitalize().replace('46v', '46V')}ImageProcessor", "patch_size": PATCH}
        | {"temporal_patch_size": 2, "merge_size": 2, "size": {"shortest_edge": 128, "longest_edge": 1536}},
        (*marks, "<|end_of_video|>"),
        {"image_token_id": "<|image|>", "video_token_id": "<|video|>", "image_start_token_id": "<|begin_of_image|>"}
        | {"image_end_token_id": "<|end_of_image|>", "video_start_token_id": "<|begin_of_video|>"}
        | {"video_end_token_id": "<|end_of_video|>"},
        written="<|begin_of_image|><|image|><|end_of_image|>",
    )


KINDS: dict[str, Kind] = {
    "qwen3_5": Kind(
        {"model_type": "qwen3_5_text"} | _QWEN3_5,
        _QWEN3_5_TOWER,
        PROCESSORS["qwen3_vl"],
        ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
        _QWEN_TOKENS,
        config={"video_token_id": 95},
    ),
    "gemma4": Kind(
        {
            "model_type": "gemma4_text",
            "head_dim": 8,
            "global_head_dim": 16,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": 96,
            "sliding_window": 6,
        },
        {
            "model_type": "gemma4_vision",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "patch_size": PATCH,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        {"image_processor_type": "Gemma4ImageProcessor", "patch_size": PATCH, "pooling_kernel_size": 2}
        | {"max_soft_tokens": 70},
        ("<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>", "<|video|>"),
        {"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"}
        | {"audio_token_id": "<|audio|>", "boa_token_id": "<|audio>", "eoa_token_index": "<audio|>"}
        | {"video_token_id": "<|video|>"},
        roles={"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
        | {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
    ),
    "internvl": Kind(
        {"model_type": "qwen3", "head_dim": 8},
        {
            "model_type": "internvl_vision",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [16, 16],
            "patch_size": [PATCH, PATCH],
        },
        {"image_processor_type": "GotOcr2ImageProcessor"} | _TILES,
        ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        {"image_token_id": "<IMG_CONTEXT>"},
        roles={"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
        | {"video_token": "<video>"},
        config={"image_seq_length": 4},
        processor={"image_seq_length": 4},
    ),
    "qwen3_5_moe": Kind(
        {"model_type": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 16}
        | _QWEN3_5,
        _QWEN3_5_TOWER,
        PROCESSORS["qwen3_vl"],
        ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
        _QWEN_TOKENS,
        config={"video_token_id": 95},
    ),
    "glm4v": _glm("glm4v"),
    "glm46v": _glm("glm46v"),
    "pixtral": Kind(
        {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        _PIXTRAL_TOWER,
        _PIXTRAL_PIXELS,
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        {"image_token_index": "[IMG]"},
        config={"model_type": "llava", "vision_feature_select_strategy": "full", "vision_feature_layer": -1},
        processor={"processor_class": "PixtralProcessor", "patch_size": PATCH},
    ),
    "mistral3": Kind(
        {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        _PIXTRAL_TOWER,
        _PIXTRAL_PIXELS,
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        {"image_token_index": "[IMG]"},
        config={"spatial_merge_size": 2, "vision_feature_layer": -1},
        processor={"patch_size": PATCH, "spatial_merge_size": 2},
    ),
    "llava_onevision": Kind(
        {"model_type": "qwen2"},
        _SIGLIP | {"vision_use_head": False},
        {"image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 16, "width": 16}}
        | {"image_grid_pinpoints": _PINPOINTS},
        ("<image>", "<video>"),
        {"image_token_index": "<image>", "video_token_index": "<video>"},
        config={"image_grid_pinpoints": _PINPOINTS},
        processor={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "aya_vision": Kind(
        {"model_type": "cohere2", "head_dim": 8, "sliding_window": 6, "logit_scale": 0.3},
        _SIGLIP | {"vision_use_head": False},
        {"image_processor_type": "GotOcr2ImageProcessor"} | _TILES,
        ("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>"),
        {"image_token_index": "<|IMG_PATCH|>"},
        processor={"patch_size": PATCH, "img_size": 16, "downsample_factor": 2},
    ),
    "janus": Kind(
        {"model_type": "llama"},
        {
            "model_type": "janus_vision_model",
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": PATCH,
            "projection_dim": 32,
            "num_image_tokens": 16,
            "mlp_ratio": 2.0,
        },
        {"image_processor_type": "JanusImageProcessor", "size": {"height": 16, "width": 16}, "min_size": PATCH},
        ("<image_placeholder>", "<begin_of_image>", "<end_of_image>"),
        {"image_token_id": "<image_placeholder>"},
        roles={"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"},
        config={
            "vq_config": {"embed_dim": 4, "num_embeddings": 8, "latent_channels": 8, "base_channels": 32}
            | {"channel_multiplier": [1, 1], "num_res_blocks": 1, "projection_dim": 32, "image_token_embed_dim": 32}
        },
        processor={"num_image_tokens": 16},
    ),
    "ovis2": Kind(
        {"model_type": "qwen2"},
        {
            "model_type": "ovis2_vision",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": PATCH,
            "vocab_size": 24,
        },
        {"image_processor_type": "Ovis2ImageProcessor", "min_patches": 1} | _TILES,
        ("<image>", "<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
        {"image_token_id": "<IMG_ATOM>"}
        | {"visual_indicator_token_ids": ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")},
        config={"hidden_size": 32, "vocab_size": 96},
        processor={"image_seq_length": 16},
    ),
    "llava_next": Kind(
        {"model_type": "llama"},
        _CLIP,
        {"image_processor_type": "LlavaNextImageProcessor"} | _SQUARES,
        ("<image>",),
        {"image_token_index": "<image>"},
        config={"image_grid_pinpoints": _PINPOINTS},
        processor={"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
}


def derived_tokenizer(kind: str, path: Path) -> Any:
    """Return a tokenizer that knows the family's tokens, some of them by name, as its files say."""
    known = KINDS[kind]
    tokenizer = picture_tokenizer() if "qwen" in kind else character_tokenizer(known.marks)
    written = "<|vision_start|><|image_pad|><|vision_end|>"
    if "qwen" not in kind:
        tokenizer.chat_template = picture_tokenizer().chat_template.replace(written, known.written or known.marks[0])
    tokenizer.save_pretrained(path)
    file = path / "tokenizer_config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"extra_special_tokens": dict(known.roles)} if known.roles else values))
    return AutoTokenizer.from_pretrained(path)


def derived_config(kind: str, tokenizer: Any) -> dict[str, Any]:
    """Return a tiny configuration."""
    known = KINDS[kind]
    ids = {
        field: tokenizer.convert_tokens_to_ids(token if isinstance(token, str) else list(token))
        for field, token in known.ids.items()
    }
    sections = {
        "text_config": COMMON | {"max_position_embeddings": 512} | dict(known.text),
        "vision_config": dict(known.tower),
    }
    return {"model_type": kind, "tie_word_embeddings": False, **sections, **known.config, **ids}


def derived_model(kind: str, tokenizer: Any) -> Any:
    """Return a float32 model in evaluation mode; every tensor matters."""
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**derived_config(kind, tokenizer)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
                if parameter.ndim > 1 and kind != "gemma4":  # its norms in float32 would send rounding too far
                    parameter.mul_(2.0)
    return model.eval()


def derived_directory(path: Path, kind: str) -> Path:
    """Save a model as plain transformers does, its tokenizer, and the files of its processor as the hub has them."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = derived_tokenizer(kind, path)
    derived_model(kind, tokenizer).save_pretrained(path)
    known = KINDS[kind]
    (path / "preprocessor_config.json").write_text(json.dumps(dict(known.image_processor)))
    (path / "processor_config.json").write_text(json.dumps(dict(known.processor)))
    return path


def tokenizer_in(directory: Path) -> Any:
    """Return the tokenizer of a directory's file, as a run reads it; Qwen3_5Tokenizer splits otherwise."""
    return load_tokenizer(ModelConfig(path=str(directory)), directory)


def parts_of(directory: Path) -> tuple[Any, Any, Any]:
    """Return a directory's processor, without its part for videos, its tokenizer and its configuration."""
    config, tokenizer = AutoConfig.from_pretrained(directory), tokenizer_in(directory)
    image_processor = load_image_processor(ModelConfig(path=str(directory)), config, [directory])
    settings = processor_settings([directory])
    return whole_processor(image_processor, tokenizer, config, settings), tokenizer, config


def derived_side(directory: Path) -> ImageSide:
    """Return what turns images into tokens for a directory."""
    whole, tokenizer, config = parts_of(directory)
    side = image_side(whole.image_processor, tokenizer, config, settings=processor_settings([directory]))
    assert isinstance(side, ImageSide), side
    return side
