"""The `model.lora` section: low-rank adapters on a frozen model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from holdfast.config.base import Mistake, Pattern, Positive, PositiveInt, ProperFraction, Section

FourBitKind = Literal["nf4", "fp4"]


class LoRAConfig(Section):
    """Train B A beside frozen matrices W, so that a layer computes (W + scale B A) x (Hu et al., arXiv:2106.09685)."""

    rank: PositiveInt = 16
    """Rows of A and columns of B."""
    alpha: Positive = 32.0
    """Scale times rank, or times the root of the rank with `rank_stabilised`."""
    rank_stabilised: bool = False
    """Scale by alpha / sqrt(rank), so that learning does not slow down as the rank grows (arXiv:2312.03732)."""
    dora: bool = False
    """Train the length of each row of W + scale B A apart from its direction (Liu et al., arXiv:2402.09353)."""
    targets: list[Pattern] | Literal["all-linear"] = "all-linear"
    """Linear layers that get an adapter, by name; `all-linear`: those of the language model's blocks."""
    experts: list[Pattern] | Literal["all"] = Field(default_factory=list)
    """Stacks of experts' matrices that get an adapter for each expert, by parameter name, as in
    ["experts.down_proj"]."""
    exclude: list[Pattern] = Field(default_factory=list)
    """Layers and stacks that get none."""
    ranks: dict[Pattern, PositiveInt] = Field(default_factory=dict)
    """Pattern to another rank, as in {"q_proj|v_proj": 64}; the first that matches counts."""
    dropout: ProperFraction = 0.0
    """Of what goes into A, while training."""
    quantize: FourBitKind | None = None
    """Keep the frozen linear layers of the blocks in 4 bits (QLoRA, arXiv:2305.14314), in blocks of 64 numbers; needs
    `bitsandbytes`."""
    train: list[Pattern] = Field(default_factory=list)
    """Parameters that are trained whole, beside the adapters: norms or embeddings, for example."""
    path: str | None = None
    """A directory in peft's format to start from; its ranks and targets must be these."""
    any_base: bool = False
    """Accept adapters in `path` that were trained beside other weights than those in `model.path`."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield an empty choice, and what cannot be had together."""
        if self.targets == [] and self.experts == []:
            yield "targets", "no layer is named; name patterns, or use all-linear"
        if self.experts != []:
            yield from self._of_experts()
        if self.dora and self.quantize is not None:
            yield (
                "dora",
                f"peft reads the rows of W for it at every step, and quantize: {self.quantize} packs them; choose "
                "one of the two",
            )
        if self.any_base and self.path is None:
            yield "any_base", "there are no adapters to accept; set path, or leave it out"

    def _of_experts(self) -> Iterator[Mistake]:
        if self.dora:
            yield "dora", "peft has no DoRA for stacks of experts; leave out experts, or dora"
        if self.dropout > 0:
            yield "dropout", "an expert's adapter is added to its matrix, where nothing can be dropped; leave out one"
