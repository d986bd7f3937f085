"""Parts of a step's memory by hand: from shapes alone, with nothing of the package.

Per rank: a matrix of R rows lies as ceil(R / n) rows on the first of n ranks, and an allocation is a multiple of 512
bytes on a GPU. What is gathered is in bfloat16; a rank alone has a copy of everything instead, in every phase. Sums are
of the moments at which a phase takes most:

- forward: in the head, with its first and only chunk of logits. A head of its own is gathered alone; a tied one with
  the last norm, since the root holds them, and with the last block, whose place nothing has taken yet. Beside the
  logits, which stay in bfloat16 and become their own slopes, stand the gradient of the matrix in float32, and three
  [tokens, hidden] of states and their gradients. Of activations: what a compiled block keeps, what comes out of the
  last one, the last norm's float32 copy, what its weight's gradient is made of, and two tables of rotary angles. Where
  activations are offloaded, what goes into all blocks but the last is in host memory.
- backward: two blocks are gathered, the one at work and the next, with the rows that pad their shards, and a tied root
  with them; where the head outweighs them, a backward pass takes most at its start, with what the forward pass ended
  with.
- resume: parameters and, of a checkpoint that is loaded, what the optimizer keeps; this rank's part of everything that
  is stored is in host memory at once, in the dtypes of the files, and on the device no second time.
- optimizer: parameters, their gradients, moments: two and a count per tensor; with bfloat16 weights a compensation too.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    activations: bool = False
    """Whether activations are offloaded."""
    states: bool = False
    """Whether the optimizer is, and nothing else; then a load of its state touches no device memory."""
    lora: int = 0
    recompute: str = "full"
    starts: bool = False
    """Whether a backward pass takes most at its start."""

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
        return {
            "steps": 2,
            "model": model,
            "optim": optim,
            "parallel": {
                "replicate": self.replicate,
                "offload": [
                    *(["optimizer", "parameters"] * self.offload),
                    *(["activations"] * self.activations),
                    *(["optimizer"] * self.states),
                ],
                "recompute": self.recompute,
            },
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


def gathered(matrices: list[Matrix], ranks: int) -> int:
    """Return the bytes of gathered matrices with the rows that pad their shards: 4 experts of 8 ranks are 8."""
    return sum(2 * -(-rows // ranks) * ranks * columns for rows, columns in matrices)


def by_hand(shape: Shape) -> dict[str, dict[str, float]]:
    """Return phase -> kind -> bytes."""
    base = [*block(shape) * shape.layers, *ends(shape)]
    trained = adapters(shape) * shape.layers if shape.lora else base
    stored = 2 if shape.bfloat16 else 4
    shards = allocated(trained, stored, shape.shards)
    parameters = shards + (allocated(base, 2, shape.shards) if shape.lora else 0)
    moments = 3 * shards if shape.bfloat16 else 2 * shards + 512 * len(trained)
    rows = shape.tokens * shape.hidden * 2
    one_block = gathered(block(shape), shape.shards) + (gathered(adapters(shape), shape.shards) if shape.lora else 0)
    root = 2 * numbers(ends(shape)[:2]) if shape.tied else 0
    blocks = 1 if shape.activations else shape.layers
    kept = blocks * kept_by_block(shape) + (3 if shape.lora else 4) * rows + angles(shape)
    forward = {"activations": kept, "head": head(shape)}
    backward: dict[str, float] = {}
    optimizer: dict[str, float] = {}
    if shape.shards > 1:
        forward["gathered"] = root + one_block if shape.tied else 2 * shape.vocabulary * shape.hidden
        backward["gathered"] = forward["gathered"] if shape.starts else root + 2 * one_block
    elif not shape.bfloat16 and not shape.lora and not shape.offload:
        for phase in (forward, backward, optimizer):
            phase["gathered"] = allocated(base, 2, 1)
    if not shape.offload:
        forward |= {"parameters": parameters, "optimizer": moments}
        optimizer |= {"parameters": parameters, "gradients": shards, "optimizer": moments}
    if shape.states:
        del forward["optimizer"], optimizer["optimizer"], optimizer["gradients"]
    return {"forward": forward, "backward": backward, "optimizer": optimizer}


def kept_by_block(shape: Shape) -> int:
    """Return what a compiled block keeps for its backward pass: what goes into it alone, where it is recomputed.

    Otherwise what its products and its attention read, and of the rest only what no products come before: the inputs
    of both norms, their normed forms, the output of attention and that of its projection; queries, keys and values;
    both halves of the gated layer and their product; in float32 the norms' factors and attention's sums of each head.
    Normed and activated numbers in float32, which an eager block keeps, are computed again.
    """
    if shape.recompute == "full":
        return 2 * shape.tokens * shape.hidden
    queries, keys = shape.heads * shape.size, shape.key_heads * shape.size
    narrow = 4 * shape.hidden + 2 * queries + 2 * keys + 3 * shape.ffn
    return shape.tokens * (2 * narrow + 4 * (2 + shape.heads))


def angles(shape: Shape) -> int:
    """Return the bytes of cosines and sines of rotary angles."""
    size = shape.hidden // shape.heads if shape.experts else shape.size
    return 2 * 2 * shape.tokens * size


def resumed_by_hand(shape: Shape) -> dict[str, dict[str, float]]:
    """Return device type -> kind -> bytes while a checkpoint is loaded."""
    base = [*block(shape) * shape.layers, *ends(shape)]
    trained = adapters(shape) * shape.layers if shape.lora else base
    on_device = {kind: by_hand(shape)["forward"].get(kind, 0) for kind in ("parameters", "optimizer")}
    frozen = sum(local(matrix, shape.shards) for matrix in base) * 2 if shape.lora else 0
    states = 4 * 2 if shape.bfloat16 else 3 * 4  # of the weight, two moments and, in bfloat16, a compensation
    counts = 0 if shape.bfloat16 else 4 * len(trained)
    on_host = frozen + states * sum(local(matrix, shape.shards) for matrix in trained) + counts
    return {"cuda": {} if shape.offload or shape.states else on_device, "cpu": {"checkpoint": on_host}}


def local(matrix: Matrix, ranks: int) -> int:
    """Return the numbers of a matrix on the first rank."""
    return -(-matrix[0] // ranks) * matrix[1]


def head(shape: Shape) -> float:
    """Return what the head takes at its peak; nothing is trained in it where only adapters are."""
    tokens = shape.tokens - 1  # nothing predicts the first
    logits = tokens * shape.vocabulary * 2
    states = 3 * tokens * shape.hidden * 2
    table = shape.vocabulary * shape.hidden
    return logits + states + (0 if shape.lora else 4 * table)


SHAPES = {
    "dense": Shape(),
    "dense, tied": Shape(tied=True),
    "dense, one rank": Shape(ranks=1, tokens=3072),
    "dense, rows that do not divide": Shape(ranks=3, hidden=384, heads=6),
    "dense, 64 ranks": Shape(ranks=64),
    "dense, larger vocabulary": Shape(tokens=1536, vocabulary=65536, starts=True),
    "bfloat16 states": Shape(bfloat16=True),
    "LoRA": Shape(lora=8, vocabulary=12288),
    "kept": Shape(recompute="none"),
    "kept, one rank": Shape(recompute="none", ranks=1),
    "offload": Shape(offload=True),
    "activations offloaded": Shape(activations=True),
    "optimizer offloaded": Shape(states=True),
    "optimizer offloaded, one rank": Shape(states=True, ranks=1, tokens=3072),
    "copies": Shape(replicate=2),
    "experts": Shape(experts=4, expert_ffn=256),
    "experts, tied": Shape(experts=4, expert_ffn=256, tied=True, ranks=2),
}
