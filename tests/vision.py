"""Tiny models that see, with all their files, and rows with pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from holdfast.data.tasks.synthetic import character_tokenizer, picture_tokenizer
from tests.tiny import COMMON

PATCH = 4
_QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 768},
}
_LLAVA_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 16},
    "crop_size": {"height": 16, "width": 16},
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_vl": _QWEN_PROCESSOR,
    "qwen2_5_vl": _QWEN_PROCESSOR,
    "qwen3_vl": _QWEN_PROCESSOR | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    "llava": _LLAVA_PROCESSOR,
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}},
    "idefics3": {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 16},
    },
}

PROCESSORS["qwen3_vl_moe"] = PROCESSORS["qwen3_vl"]
PROCESSORS["smolvlm"] = PROCESSORS["idefics3"] | {"image_processor_type": "SmolVLMImageProcessor"}

_QWEN_ROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
_TEXTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"model_type": "qwen2_vl_text", "rope_parameters": _QWEN_ROPE},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl_text", "rope_parameters": _QWEN_ROPE},
    "qwen3_vl": {
        "model_type": "qwen3_vl_text",
        "head_dim": 8,
        "rope_parameters": _QWEN_ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
    },
    "llava": {"model_type": "llama"},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "sliding_window": 6,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "idefics3": {"model_type": "llama"},
}
_TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": PATCH},
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": PATCH,
        "out_hidden_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": PATCH,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0, 1],
        "num_position_embeddings": 16,
    },
    "llava": {
        "model_type": "clip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": PATCH,
        "projection_dim": 16,
    },
    "gemma3": {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": PATCH,
    },
    "idefics3": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": PATCH,
    },
}
_TEXTS["smolvlm"], _TOWERS["smolvlm"] = _TEXTS["idefics3"], _TOWERS["idefics3"]
_TOWERS["qwen3_vl_moe"] = _TOWERS["qwen3_vl"]
_TEXTS["qwen3_vl_moe"] = _TEXTS["qwen3_vl"] | {
    "model_type": "qwen3_vl_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_TILES = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
MARKS = {
    "llava": ("<image>",),
    "gemma3": ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    "idefics3": ("<image>", "<fake_token_around_image>", "<global-img>", *_TILES),
}
MARKS["smolvlm"] = MARKS["idefics3"]
"""Special tokens of the families that are not Qwen's; the first is what their templates write."""
MIXTURE = "qwen3_vl_moe"
KINDS = [kind for kind in PROCESSORS if kind not in {"smolvlm", MIXTURE}]
"""Without those whose images are another's: SmolVLM's are those of Idefics3, the mixture's those of Qwen3-VL."""


def tokenizer_of(kind: str) -> Any:
    """Return a tokenizer that knows the family's image token, and writes it for an image part."""
    if "qwen" in kind:
        return picture_tokenizer()
    found = character_tokenizer(MARKS[kind])
    template = picture_tokenizer().chat_template
    found.chat_template = template.replace("<|vision_start|><|image_pad|><|vision_end|>", MARKS[kind][0])
    return found


def config_values(kind: str, **text: Any) -> dict[str, Any]:
    """Return a tiny configuration whose tokens are those of `tokenizer_of`."""
    ids = tokenizer_of(kind).convert_tokens_to_ids
    values: dict[str, Any] = {
        "model_type": kind,
        "text_config": COMMON | _TEXTS[kind] | text,
        "vision_config": _TOWERS[kind],
        "tie_word_embeddings": False,
    }
    if kind == "llava":
        return values | {"image_token_index": ids("<image>")}
    if kind in {"idefics3", "smolvlm"}:
        return values | {"image_token_id": ids("<image>"), "scale_factor": 2}
    if kind == "gemma3":
        begin, inside, end = (ids(mark) for mark in MARKS[kind])
        marks = {"image_token_index": inside, "boi_token_index": begin, "eoi_token_index": end}
        return values | marks | {"mm_tokens_per_image": 4}
    return values | {
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": 95,
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
    }


def vision_model(kind: str, *, seed: int = 0, **text: Any) -> Any:
    """Return a float32 model in evaluation mode; every tensor matters, and attention is far from uniform."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config_values(kind, **text)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
                if parameter.ndim > 1:
                    parameter.mul_(3.0)
    return model.eval()


def vision_directory(path: Path, kind: str, **text: Any) -> Path:
    """Save a model, its tokenizer and its image processor's file as plain transformers names them."""
    vision_model(kind, **text).save_pretrained(path)
    tokenizer_of(kind).save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[kind], indent=2) + "\n\n")
    return path


def picture(generator: np.random.Generator, height: int, width: int) -> Any:
    """Return a picture of noise, in which no two patches are alike."""
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def picture_rows(count: int, *, images: Sequence[int] = (1, 0, 2), seed: int = 0) -> list[dict[str, Any]]:
    """Return conversations with so many pictures each, in turn, of uneven sizes and lengths."""
    generator = np.random.default_rng(seed)
    letters = np.array(list("abcdefghij"))
    rows = []
    for index in range(count):
        pictures = [picture(generator, *generator.integers(8, 40, 2)) for _ in range(images[index % len(images)])]
        said = "".join(generator.choice(letters, generator.integers(1, 9)))
        answer = "".join(generator.choice(letters, generator.integers(1, 20)))
        asked = [*({"type": "image", "image": held} for held in pictures), {"type": "text", "text": f"see {said}="}]
        rows.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]})
    return rows
