"""Tiny models with weights that matter: a dropped or swapped tensor changes the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from holdfast.data.tasks.synthetic import character_tokenizer

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
EXTRA: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8},
    "mistral": {"head_dim": 8, "sliding_window": 6},
    "gemma2": {"head_dim": 8, "sliding_window": 6},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6},
    "cohere2": {"head_dim": 8, "sliding_window": 6, "logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
    },
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
}


def tiny_model(kind: str, *, seed: int = 0, **overrides: Any) -> Any:
    """Return a float32 transformers model whose norms and biases are not the identity.

    Of `phi3:longrope` the kind is phi3; what follows the colon sets a variant apart in tables of settings.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = kind.partition(":")[0]
    config = AutoConfig.for_model(kind, **(COMMON | EXTRA.get(kind, {}) | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def tiny_directory(path: Path, kind: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Save a tiny model and a tokenizer with plain transformers."""
    tiny_model(kind, seed=seed, **overrides).save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path
