"""The models that benchmarks train: shapes of Qwen2, with weights drawn from one seed."""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "small": {
        "vocab_size": 32_000,
        "hidden_size": 256,
        "intermediate_size": 1408,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "135m": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "0.5b": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5b": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "7b of six layers": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 6,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
"""`small` is what the scripts train on a CPU, `tiny` what only shows that they run."""


def settings_of(shape: str) -> dict[str, Any]:
    """Return the configuration of a model, as `model.config` takes it."""
    return {"model_type": "qwen2", "max_position_embeddings": 4096, "tie_word_embeddings": True, **SHAPES[shape]}


def random_model(shape: str, device: str = "cpu") -> Any:
    """Return a model of a shape in float32; its weights are the same in every process on one kind of device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.for_model(**settings_of(shape))
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()
