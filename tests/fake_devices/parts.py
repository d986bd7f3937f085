"""Parts of a step's memory by hand: from shapes alone, with nothing of the package.

Per rank: a matrix of R rows lies as ceil(R / n) rows on the first of n ranks, and an allocation is a multiple of 512
bytes on a GPU. What is gathered is in bfloat16. Sums are of the moment at which a phase takes most:

- forward: in the head, where the head's own matrix is gathered (a tied one with the embedding and the last norm, since
  the root holds it, and the last block with it: nothing has taken its place). The head has its gradient in float32 and
  bfloat16 logits of a chunk beside float32 ones.
- optimizer: parameters, their gradients, two moments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A model, and how it is trained."""

    hidden: int = 512
    ffn: int = 1536
    layers: int = 3
    heads: int = 8
    key_heads: int = 2
    size: int = 64
    vocabulary: int = 8192
    tied: bool = False
    experts: int = 0
    chosen: int = 2
    expert_ffn: int = 512
    ranks: int = 8
    replicate: int = 1
    tokens: int = 1024
    bfloat16: bool = False
    offload: bool = False
    lora: int = 0
    recompute: str = "full"

    @property
    def shards(self) -> int:
        return self.ranks // self.replicate

    def config(self) -> dict[str, Any]:
        """Return `model.config`."""
        values: dict[str, Any] = {
            "model_type": "qwen3_moe" if self.experts else "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": self.tied,
        }
        if self.experts:
            more = {"num_experts": self.experts, "num_experts_per_tok": self.chosen, "decoder_sparse_step": 1}
            return values | more | {"moe_intermediate_size": self.expert_ffn}
        return values | {"head_dim": self.size}

    def run(self) -> dict[str, Any]:
        """Return the run."""
        model: dict[str, Any] = {"config": self.config(), "tokenizer": "builtin:characters"}
        optim: dict[str, Any] = {"lr": 1e-5, "schedule": "constant"}
        if self.bfloat16:
            model["dtype"], optim["kind"] = "bfloat16", "adamw_bf16"
        if self.lora:
            model["lora"] = {"rank": self.lora}
            model["frozen_dtype"] = "bfloat16"
        return {
            "steps": 2,
            "model": model,
            "optim": optim,
            "parallel": {"replicate": self.replicate, "cpu_offload": self.offload, "recompute": self.recompute},
            "data": {
                "synthetic": {"task": "sort", "rows": 64},
                "batch_size": self.ranks,
                "max_length": self.tokens,
                "tokens_per_micro_batch": self.tokens,
            },
        }


Matrix = tuple[int, int]
"""Rows, and numbers of a row."""


def block(shape: Shape) -> list[Matrix]:
    """Return the tensors of a block, by hand from the architecture."""
    query = shape.heads * (shape.hidden // shape.heads if shape.experts else shape.size)
    key = shape.key_heads * (query // shape.heads)
    attention = [(query, shape.hidden), (key, shape.hidden), (key, shape.hidden), (shape.hidden, query)]
    norms = [(shape.hidden, 1)] * 2
    if not shape.experts:
        return [*attention, *norms, (shape.ffn, shape.hidden), (shape.ffn, shape.hidden), (shape.hidden, shape.ffn)]
    size = query // shape.heads
    stacks = [
        (shape.experts, 2 * shape.expert_ffn * shape.hidden),
        (shape.experts, shape.hidden * shape.expert_ffn),
    ]
    return [*attention, *norms, (size, 1), (size, 1), (shape.experts, shape.hidden), *stacks]


def adapters(shape: Shape) -> list[Matrix]:
    """Return the adapters of a block's seven linear layers."""
    linear = [(rows, columns) for rows, columns in block(shape) if columns > 1]
    return [matrix for rows, columns in linear for matrix in ((shape.lora, columns), (rows, shape.lora))]


def ends(shape: Shape) -> list[Matrix]:
    """Return embedding, last norm and head."""
    table = (shape.vocabulary, shape.hidden)
    return [table, (shape.hidden, 1), *([] if shape.tied else [table])]


def allocated(matrices: list[Matrix], width: int, ranks: int) -> int:
    """Return the bytes of shards on the first rank."""
    return sum(-(-(-(-rows // ranks) * columns * width) // 512) * 512 for rows, columns in matrices)


def numbers(matrices: list[Matrix]) -> int:
    return sum(rows * columns for rows, columns in matrices)


@dataclass(frozen=True)
class Parts:
    """Bytes by kind, by phase."""

    of: dict[str, dict[str, float]] = field(default_factory=dict)


def by_hand(shape: Shape) -> dict[str, dict[str, float]]:
    """Return phase -> kind -> bytes."""
    base = [*block(shape) * shape.layers, *ends(shape)]
    trained = adapters(shape) * shape.layers if shape.lora else base
    stored, frozen = (2 if shape.bfloat16 else 4), (2 if shape.lora else 0)
    parameters = allocated(trained, stored, shape.shards) + (allocated(base, frozen, shape.shards) if frozen else 0)
    gradients = allocated(trained, stored, shape.shards)
    moments = allocated(trained, stored, shape.shards) * (3 if shape.bfloat16 else 2)
    table = shape.vocabulary * shape.hidden
    chunk = min(shape.tokens, max(128, min(4096, 2**29 // (4 * shape.vocabulary))))
    here = 0.0 if shape.offload else 1.0
    one_block = 2 * (numbers(block(shape)) + (numbers(adapters(shape)) if shape.lora else 0))
    root = 2 * numbers(ends(shape)[:2]) if shape.tied else 0.0
    sharded = shape.shards > 1
    rotary = 512
    return {
        "optimizer": {
            "parameters": parameters * here + rotary,
            "gradients": gradients * here,
            "optimizer": moments * here,
        },
        "forward": {
            "parameters": parameters * here + rotary,
            "optimizer": moments * here,
            "gathered": (root + one_block if shape.tied else 2.0 * table) if sharded else -1,
            "head": head_bytes(shape, table, chunk),
        },
    }


def head_bytes(shape: Shape, table: int, chunk: int) -> float:
    """Return what the head takes at its peak: see `Shape`, whose head is trained unless only adapters are."""
    logits = chunk * shape.vocabulary
    gradient = 0 if shape.lora else 4 * table
    del logits
    return float(gradient)
