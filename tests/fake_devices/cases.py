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
PLACES = ((1, 0), (8, 0))
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
    "sft experts": tree(model={"config": EXPERTS}),
    "sft LoRA, 4 bits": tree(model={"lora": {"rank": 4, "quantize": "nf4"}, "frozen_dtype": "bfloat16"}),
    "sft shared rows, recomputed": tree(parallel={"context": 4, "recompute": "full"}),
    "sft adamw_8bit": tree(optim={"kind": "adamw_8bit"}),
    "sft images": tree(
        model={"path": "llava", "config": None, "tokenizer": None},
        data={"synthetic": None, "path": "rows.jsonl"},
    ),
    "dpo offloaded reference": tree(preference={"loss": "dpo"}, reference={"kind": "offloaded"}),
    "grpo reference": policy(kl={"coefficient": 0.1}, updates={"mini_batches": 2}),
    "ppo": policy(advantage="gae", critic={}),
    "distill on own texts": tree(
        teacher={"path": "teacher"}, distill={"loss": "reverse_kl"}, rollout={"max_new_tokens": 64}
    ),
}
"""Name -> the run. Where it says `teacher` or the name of a model that sees, the lane makes a directory of it."""


def is_made(name: str, place: tuple[int, int]) -> bool:
    """Return whether a run is executed as a rank of so many: one rank alone shares no rows."""
    return place[0] > 1 or name != "sft shared rows, recomputed"
