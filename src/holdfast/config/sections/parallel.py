"""The `parallel` section: how parameters are sharded, in which precision, what is recomputed and compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from holdfast.config.base import ByKind, Mistake, Pattern, PositiveInt, Section


class _Recompute(Section):
    removed: ClassVar[Mapping[str, str]] = {
        "use_reentrant": "the non-reentrant form is always used. The reentrant one loses gradients without a word: it "
        "hides a cache that recomputation fills a second time (key and value weights get zero gradients) and cuts the "
        "router loss of experts off. Remove the key"
    }


class NoRecompute(_Recompute):
    """Keep all activations."""

    kind: Literal["none"] = "none"


class FullRecompute(_Recompute):
    """Keep each block's input and run its forward again in the backward pass."""

    kind: Literal["full"] = "full"


class EveryKRecompute(_Recompute):
    """Recompute every k-th block."""

    kind: Literal["every_k"] = "every_k"
    k: PositiveInt = 2
    """2 recomputes every second block."""


class SelectiveRecompute(_Recompute):
    """Keep the outputs of matrix products and attention, recompute the rest."""

    kind: Literal["selective"] = "selective"


Recompute = Annotated[NoRecompute | FullRecompute | EveryKRecompute | SelectiveRecompute, ByKind("none")]


Offloaded = Literal["activations", "optimizer", "parameters"]


class ParallelConfig(Section):
    """One plan for the policy and every model built like it."""

    replicate: PositiveInt = 1
    """Copies of the sharded model (HSDP): the number of ranks is replicate x shard x context."""
    shard: PositiveInt | Literal["auto"] = "auto"
    """Ranks that share one copy, divided by `context`; `auto`: all ranks divided by `replicate` and `context`."""
    context: PositiveInt = 1
    """Neighbouring ranks that share every packed row (context parallelism, Ulysses, arXiv:2309.14509): each computes an
    equal span of its positions, and around attention they exchange spans of all heads for whole rows of some heads. A
    row may be `context` times as long as `data.tokens_per_micro_batch`. Parameters are sharded over these ranks too.
    The attention heads must be a multiple of it."""
    units: list[Pattern] = Field(default_factory=list)
    """Modules gathered together, by name; default: each transformer block. Embedding and head stay units of their own
    where they are not tied. A tower that sees stays a unit, and so do its blocks unless a part of it is named."""
    blocks_per_unit: PositiveInt = 1
    """Neighbouring blocks gathered together: fewer and larger messages for more memory."""
    reshard: bool = True
    """Free a unit's gathered parameters after its forward pass and gather them again for the backward pass. The root's
    stay where a backward pass follows, which begins with them."""
    offload: list[Offloaded] = Field(default_factory=list)
    """What is kept in host memory, for less device memory and more time. `activations`: what the backward pass reads of
    each block, or of a recomputed block its input, copied beside the passes; `optimizer`: its state, so that it runs on
    the CPU, to which gradients are copied during the backward pass; `parameters`, with `optimizer` alone: shards and
    gradients too, so that FSDP2 gathers from host memory."""
    cpu_offload: bool = False
    """`true` is read as `offload: [optimizer, parameters]`."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of forward and backward passes; gradients are reduced in float32 or better. `auto`: bfloat16 on a GPU,
    `model.dtype` on the CPU."""
    recompute: Recompute = NoRecompute()
    """Activation checkpointing; always the non-reentrant form with its random state restored."""
    compile: Literal["auto", "blocks", "off", "head"] = "auto"
    """torch.compile of each transformer block, attention included; one program serves all blocks of a kind and
    documents of any lengths. `auto`: on a GPU, where the model's parts can be compiled. Blocks that do not compile, or
    that fail the check before step 1, run uncompiled, which is printed. Layers of decoding steps that `rollout.graphs`
    records are compiled likewise. `head` is read as `auto`."""
    reduce: Literal["auto", "each_micro_batch", "last_micro_batch"] = "auto"
    """When gradients are reduced over ranks. `auto`: every micro-batch for float32 storage; the last one for
    bfloat16 storage, where adding reduced gradients would round away small ones."""

    @property
    def offloads(self) -> frozenset[Offloaded]:
        """What is kept in host memory, by whichever key."""
        by_old_key: tuple[Offloaded, ...] = ("optimizer", "parameters") if self.cpu_offload else ()
        return frozenset((*self.offload, *by_old_key))

    def of_frozen(self, *, in_host_memory: bool) -> ParallelConfig:
        """Return the section of a model that is built like the policy and never trained."""
        offload = ["optimizer", "parameters"] if in_host_memory else []
        return self.model_copy(update={"cpu_offload": False, "offload": offload})

    def mistakes(self) -> Iterator[Mistake]:
        """Yield what cannot be offloaded together."""
        offloads = self.offloads
        if offloads in ({"parameters"}, {"parameters", "activations"}):
            yield (
                "offload",
                "parameters in host memory are updated there, so gradients and optimizer state are too; add optimizer",
            )
        if "activations" in offloads and self.recompute.kind == "selective":
            yield (
                "offload",
                "activations with recompute: selective would stay on the device, since torch keeps the products of "
                "selective recomputation outside of autograd. Use recompute: full, every_k or none",
            )
