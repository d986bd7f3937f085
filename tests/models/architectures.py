"""Tiny models of many architectures, scaled until softmax, caps and windows are far from linear."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tests.tiny import tiny_model

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 6.0],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}

SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {},
    "mistral": {},
    "gemma2": {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"sliding_window": 6},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.4, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm4": {"head_dim": 8, "partial_rotary_factor": 0.5},
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"]},
    "starcoder2": {"sliding_window": 6},
    "mixtral": {"sliding_window": 6},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.2},
    "qwen3_moe": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "glm4_moe": {
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
    },
    "minicpm3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "dim_model_base": 16,
        "scale_emb": 3,
    },
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 100.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
}
"""What each architecture that is packed needs beside `tests.tiny`; sliding windows are 6."""

BY_LENGTH: dict[str, dict[str, Any]] = {
    "phi3:longrope": {"sliding_window": 6, "original_max_position_embeddings": 20, "rope_parameters": LONGROPE},
    "llama:dynamic": {"max_position_embeddings": 20, "rope_parameters": DYNAMIC},
}
"""Architectures whose rotary angles depend on the length of a text, here beyond 20 tokens; they are not packed."""

RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"reason": "linear_attention", "state_size": 8},
    "falcon_h1": {
        "reason": "Conv1d",
        "head_dim": 8,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "lm_head_multiplier": 0.7,
    },
    "recurrent_gemma": {"reason": "linear_attention", "attention_window_size": 6, "num_hidden_layers": 3},
    "lfm2": {"reason": "conv", "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "qwen3_next": {
        "reason": "linear_attention",
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
"""Architectures that are not packed, and the word their reason names."""

LLAMA4_TEXT = {
    "num_local_experts": 4,
    "head_dim": 8,
    "intermediate_size_mlp": 48,
    "moe_layers": [1],
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 16,
}
"""A dense layer that attends in chunks, and one of experts that knows no places."""

OTHERS: dict[str, dict[str, Any]] = {
    "stablelm": {},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "gpt2": {},
    "phi": {"num_key_value_heads": 4},
    "mpt": {"n_layers": 2, "logit_scale": 0.5},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 6},
    "bart": {
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
        "encoder_layers": 1,
        "is_decoder": True,
        "is_encoder_decoder": False,
    },
    "llama4_text": LLAMA4_TEXT,
}
"""Architectures that some rule of packed attention does not fit."""


def settings_of(kind: str) -> dict[str, Any]:
    """Return what a configuration of this kind needs beside `tests.tiny`."""
    known = (SETTINGS | BY_LENGTH | RECURRENT | OTHERS)[kind]
    return {name: value for name, value in known.items() if name != "reason"}


def strong_model(kind: str, *, seed: int = 0, scale: float = 4.0, **overrides: Any) -> Any:
    """Return a tiny model whose matrices are `scale` times as large, in float32 and evaluation mode.

    With the small weights of a fresh model attention is nearly uniform, and a soft cap or a window that is ignored
    would hide below every tolerance.
    """
    model = tiny_model(kind, seed=seed, **(settings_of(kind) | overrides))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    if kind == "gemma2":
        model.set_attn_implementation("eager")  # transformers 5.19 would take sdpa, which ignores the soft cap
    return model


def forgetful(model: Any) -> Any:
    """Let a model's rotary angles be those of a new model at every pass; return it."""

    def forget(module: Any, *_: object) -> None:
        module.inv_freq = module.original_inv_freq.clone()
        module.max_seq_len_cached = module.original_max_seq_len

    for module in model.modules():
        if hasattr(module, "original_inv_freq"):
            module.register_forward_pre_hook(forget)
    return model


def fresh(model: Any) -> Any:
    """Return a copy that shares a model's parameters and no buffers: dynamic scaling remembers texts it has seen."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def twin(model: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a copy of a model; with a dtype, its parameters are cast and its buffers are not."""
    other = copy.deepcopy(model)
    if dtype is not None:
        for parameter in other.parameters():
            parameter.data = parameter.data.to(dtype)
    return other
