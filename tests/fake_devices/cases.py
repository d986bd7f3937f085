"""The runs whose steps are executed as CUDA code without a GPU: every verb, with what changes its path."""

from __future__ import annotations

from typing import Any

DENSE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {name: value for name, value in DENSE.items() if name != "head_dim"} | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
PLACES = ((1, 0), (8, 0), (8, 7), (64, 0), (64, 63))
"""(ranks, rank) that each run is executed as."""


def tree(**sections: Any) -> dict[str, Any]:
    """Return a run on generated rows; sections are merged over it."""
    values: dict[str, Any] = {
        "steps": 4,
        "model": {"config": DENSE, "tokenizer": "builtin:characters"},
        "data": {
            "synthetic": {"task": "sort", "rows": 64},
            "batch_size": 64,
            "max_length": 128,
            "tokens_per_micro_batch": 256,
        },
        "optim": {"lr": 1e-3, "schedule": "constant"},
    }
    for name, section in sections.items():
        both = isinstance(section, dict) and isinstance(values.get(name), dict)
        values[name] = values[name] | section if both else section
    return values


def policy(**sections: Any) -> dict[str, Any]:
    """Return a run of a policy."""
    sampled = {"group_size": 4, "max_new_tokens": 96} | sections.pop("rollout", {})
    return tree(reward={"kind": "path", "path": "rewards.py:any"}, rollout=sampled, **sections)


RUNS: dict[str, dict[str, Any]] = {
    "sft": tree(),
    "sft tied": tree(model={"config": DENSE | {"tie_word_embeddings": True}}),
    "sft one pass": tree(data={"tokens_per_micro_batch": 1024}),
    "sft chunks of logits": tree(model={"head": {"chunk_tokens": 64}}),
    "sft head in float32": tree(model={"head": {"dtype": "float32"}}),
    "sft experts": tree(model={"config": EXPERTS}),
    "sft LoRA": tree(model={"lora": {"rank": 4}}),
    "sft LoRA, 4 bits": tree(model={"lora": {"rank": 4, "quantize": "nf4"}, "frozen_dtype": "bfloat16"}),
    "sft uncompiled": tree(parallel={"compile": "off"}),
    "sft offload": tree(parallel={"cpu_offload": True}),
    "sft activations offloaded": tree(parallel={"offload": ["activations"]}),
    "sft optimizer offloaded": tree(parallel={"offload": ["optimizer"]}),
    "sft copies": tree(parallel={"replicate": 2}),
    "sft shared rows": tree(parallel={"context": 2}),
    "sft shared rows, recomputed": tree(parallel={"context": 4, "recompute": "full"}),
    "sft recomputed": tree(parallel={"recompute": "full"}),
    "sft recomputed by half": tree(parallel={"recompute": "every_k"}),
    "sft recomputed selectively": tree(parallel={"recompute": "selective"}),
    "sft bfloat16": tree(model={"dtype": "bfloat16"}, optim={"kind": "adamw_bf16"}),
    "sft adamw_8bit": tree(optim={"kind": "adamw_8bit"}),
    "sft muon": tree(optim={"kind": "muon"}),
    "sft sgd": tree(optim={"kind": "sgd"}),
    "sft averages": tree(optim={"ema": {"decay": 0.9}}),
    "sft padded": tree(data={"packing": "none"}),
    "sft noise": tree(neftune_alpha=5.0),
    "sft entropy": tree(metrics={"entropy": True}),
    "dpo": tree(preference={"loss": "dpo"}),
    "dpo offloaded reference": tree(preference={"loss": "dpo"}, reference={"kind": "offloaded"}),
    "kto": tree(preference={"loss": "kto"}),
    "reward": tree(preference={"loss": "bradley_terry"}),
    "grpo": policy(),
    "grpo shared rows": policy(parallel={"context": 2}, kl={"coefficient": 0.1}),
    "grpo reference": policy(kl={"coefficient": 0.1}, updates={"mini_batches": 2}),
    "grpo experts": policy(model={"config": EXPERTS}),
    "grpo offloaded": policy(residency={"optimizer": "host", "parameters": "host"}),
    "grpo truncated sampling": policy(
        rollout={"top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}, correction="truncate"
    ),
    "grpo by covariance": policy(objective={"kind": "clip_cov"}),
    "ppo": policy(advantage="gae", critic={}),
    "distill": tree(teacher={"path": "teacher"}, distill={"loss": "reverse_kl"}),
    "distill on own texts": tree(
        teacher={"path": "teacher"}, distill={"loss": "reverse_kl"}, rollout={"max_new_tokens": 64}
    ),
    "sft images": tree(
        model={"path": "llava", "config": None, "tokenizer": None},
        data={"synthetic": None, "path": "rows.jsonl"},
    ),
}
"""Name -> the run. Where it says `teacher` or the name of a model that sees, the lane makes a directory of it."""

ONE_RANK_LESS = {"sft copies", "grpo shared rows", "sft shared rows", "sft shared rows, recomputed"}
"""Runs that one rank cannot make."""
NOT_SHARDED_ALONE = {"grpo offloaded"}
"""Runs that one rank refuses: there the engine reads the parameters themselves."""
NOT_BY_PLACE = {
    "sft uncompiled", "sft one pass", "sft activations offloaded", "sft chunks of logits", "sft head in float32",
    "sft recomputed by half", "sft recomputed selectively", "sft averages", "sft padded", "sft noise", "sft entropy",
    "grpo shared rows", "grpo truncated sampling", "grpo by covariance",
    "distill on own texts",
}  # fmt: skip
"""Runs that differ from another one in what every rank does alike: executed as the first of 8 alone."""


def is_made(name: str, place: tuple[int, int]) -> bool:
    """Return whether a run is executed as a rank of so many."""
    if name in NOT_BY_PLACE:
        return place == (8, 0)
    return place[0] > 1 or name not in ONE_RANK_LESS | NOT_SHARDED_ALONE
