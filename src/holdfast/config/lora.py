"""The `model.lora` section: low-rank adapters on a frozen model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from holdfast.config.base import Mistake, Pattern, Positive, PositiveInt, ProperFraction, Section


class LoRAConfig(Section):
    """Train B A beside frozen matrices W, so that a layer computes (W + scale B A) x (Hu et al., arXiv:2106.09685)."""

    rank: PositiveInt = 16
    """Rows of A and columns of B."""
    alpha: Positive = 32.0
    """Scale times rank, or times the root of the rank with `rank_stabilised`."""
    rank_stabilised: bool = False
    """Scale by alpha / sqrt(rank), so that learning does not slow down as the rank grows (arXiv:2312.03732)."""
    targets: list[Pattern] | Literal["all-linear"] = "all-linear"
    """Linear layers that get an adapter, by name; `all-linear`: those of the language model's blocks."""
    exclude: list[Pattern] = Field(default_factory=list)
    """Layers that get none."""
    ranks: dict[Pattern, PositiveInt] = Field(default_factory=dict)
    """Pattern to another rank, as in {"q_proj|v_proj": 64}; the first that matches counts."""
    dropout: ProperFraction = 0.0
    """Of what goes into A, while training."""
    train: list[Pattern] = Field(default_factory=list)
    """Parameters that are trained whole, beside the adapters: norms or embeddings, for example."""
    path: str | None = None
    """A directory in peft's format to start from; its ranks and targets must be these."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield an empty choice."""
        if self.targets == []:
            yield "targets", "no layer is named; name patterns, or use all-linear"
