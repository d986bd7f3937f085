"""The `parallel` section: how parameters are sharded, in which precision, what is recomputed and compiled."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag

from holdfast.config.base import KindAlone, Pattern, PositiveInt, Section, kind_or


class NoRecompute(Section):
    """Keep all activations."""

    kind: Literal["none"] = "none"


class FullRecompute(Section):
    """Keep each block's input and run its forward again in the backward pass."""

    kind: Literal["full"] = "full"


class EveryKRecompute(Section):
    """Recompute every k-th block."""

    kind: Literal["every_k"] = "every_k"
    k: PositiveInt = 2


class SelectiveRecompute(Section):
    """Keep the outputs of matrix products and attention, recompute the rest."""

    kind: Literal["selective"] = "selective"


Recompute = Annotated[
    Annotated[NoRecompute, Tag("none")]
    | Annotated[FullRecompute, Tag("full")]
    | Annotated[EveryKRecompute, Tag("every_k")]
    | Annotated[SelectiveRecompute, Tag("selective")],
    kind_or("none"),
    KindAlone,
]


class ParallelConfig(Section):
    """One plan for the policy and every model built like it."""

    replicate: PositiveInt = 1
    """Copies of the sharded model (HSDP): the number of ranks is replicate x shard."""
    shard: PositiveInt | Literal["auto"] = "auto"
    """Ranks that share one copy; `auto`: all of them divided by `replicate`."""
    units: list[Pattern] = Field(default_factory=list)
    """Modules gathered together, by name; default: each transformer block."""
    blocks_per_unit: PositiveInt = 1
    """Neighbouring blocks gathered together: fewer and larger messages for more memory."""
    reshard: bool = True
    """Free a unit's gathered parameters after its forward pass and gather them again for the backward pass."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in host memory."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of forward and backward passes; gradients are reduced in float32 or better. `auto`: bfloat16 on a GPU,
    `model.dtype` on the CPU."""
    recompute: Recompute = NoRecompute()
    """Activation checkpointing; always the non-reentrant kind with its random state restored."""
    compile: Literal["off", "head", "blocks"] = "off"
    """Regional torch.compile: the head, or each block and the head."""
    reduce: Literal["auto", "each_micro_batch", "last_micro_batch"] = "auto"
    """When gradients are reduced over ranks. `auto`: every micro-batch for float32 storage; the last one for
    bfloat16 storage, where adding reduced gradients would round away small ones."""
