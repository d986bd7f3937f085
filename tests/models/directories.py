"""Model directories written by plain transformers, many of whose weights change name or shape on the way in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from holdfast.config.sections.model import ModelConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.setup.model import Blueprint, blueprint
from holdfast.parallel.shards import materialise
from tests.models.architectures import BY_LENGTH, LLAMA4_TEXT, RECURRENT, SETTINGS, settings_of, strong_model
from tests.tiny import COMMON, EXTRA

_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}

MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": COMMON | {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 6},
        "vision_config": _VISION | {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
        "image_token_index": 5,
    },
    "llava": {
        "text_config": COMMON | {"model_type": "llama"},
        "vision_config": _VISION | {"model_type": "clip_vision_model", "projection_dim": 16},
        "image_token_index": 5,
    },
    "qwen2_vl": {
        "text_config": COMMON
        | {"model_type": "qwen2_vl_text", "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        "vision_config": {
            "depth": 2,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 8,
        },
        "image_token_id": 5,
    },
}

BLIND: dict[str, dict[str, Any]] = {
    "gemma4": {
        "text_config": COMMON
        | {
            "model_type": "gemma4_text",
            "head_dim": 8,
            "global_head_dim": 16,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": 96,
            "sliding_window": 6,
            "final_logit_softcapping": 4.0,
        },
        "vision_config": _VISION
        | {"model_type": "gemma4_vision", "head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 8},
        "image_token_id": 90,
        "video_token_id": 91,
        "audio_token_id": 92,
        "boi_token_id": 93,
        "eoi_token_id": 94,
        "boa_token_id": 95,
    },
    "llama4": {
        "text_config": COMMON | LLAMA4_TEXT | {"model_type": "llama4_text"},
        "vision_config": _VISION
        | {
            "model_type": "llama4_vision_model",
            "pixel_shuffle_ratio": 0.5,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
            "vision_output_dim": 16,
        },
        "image_token_index": 90,
        "boi_token_index": 91,
        "eoi_token_index": 92,
    },
    "blip-2": {
        "text_config": {
            "model_type": "opt",
            "vocab_size": 96,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": 2,
            "dropout": 0.0,
        },
        "vision_config": _VISION | {"model_type": "blip_2_vision_model"},
        "qformer_config": {
            "model_type": "blip_2_qformer",
            "vocab_size": 96,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "cross_attention_frequency": 2,
        },
        "num_query_tokens": 4,
        "image_token_index": 90,
    },
}
"""Models that see, and whose images are not known: they train on text."""

KINDS = [*SETTINGS, *BY_LENGTH, *RECURRENT, *MULTIMODAL, *BLIND]


def config_of(kind: str, **overrides: Any) -> Any:
    """Return the configuration of a tiny model of any kind."""
    from transformers import AutoConfig

    settings = (MULTIMODAL | BLIND).get(kind) or COMMON | EXTRA.get(kind, {}) | settings_of(kind)
    return AutoConfig.for_model(kind.partition(":")[0], **(settings | overrides))


def model_of(kind: str, *, seed: int = 0, **overrides: Any) -> Any:
    """Return a tiny model of any kind, every tensor of which matters."""
    from transformers import AutoModelForImageTextToText

    if kind not in MULTIMODAL | BLIND:
        return strong_model(kind, seed=seed, **overrides)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config_of(kind, **overrides))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def write_directory(path: Path, kind: str, *, max_shard_size: int | str = "5GB", **overrides: Any) -> Any:
    """Save a model with plain transformers, beside a tokenizer; return the model."""
    model = model_of(kind, **overrides)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    character_tokenizer().save_pretrained(path)
    return model


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a directory."""
    return {
        name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


def filled(directory: Path, **options: Any) -> tuple[PolicyModel, Blueprint]:
    """Build a model from a directory on this process alone, unsharded."""
    origin = blueprint(ModelConfig(path=str(directory), **options), Path.cwd(), seed=0)
    policy = PolicyModel(
        origin.model,
        origin.family,
        origin.family.head_spec(float32_product=False, chunk_tokens=None),
        padded=not origin.packed,
    )
    materialise(policy, origin.source, origin.buffers, torch.device("cpu"))
    return policy, origin
