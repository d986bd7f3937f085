"""The `model.router_loss` section: what keeps the experts of a mixture evenly loaded while they are trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from holdfast.config.base import ByKind, Mistake, NonNegative, Section


class AutoRouterLoss(Section):
    """`sequence` where the architecture has a router loss and its configuration a coefficient above 0, else off."""

    kind: Literal["auto"] = "auto"


class NoRouterLoss(Section):
    """Train without a router loss; loads are measured all the same."""

    kind: Literal["off"] = "off"


class _RouterLoss(Section):
    coefficient: NonNegative | None = None
    """Factor of the router loss. Default: the model configuration's router_aux_loss_coef."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a loss without effect."""
        if self.coefficient == 0:
            yield "coefficient", "0 leaves the router loss without effect; write router_loss: off, or a factor above 0"


class SequenceRouterLoss(_RouterLoss):
    """Balance the experts within each sequence: the same result for every split over ranks and micro-batches."""

    kind: Literal["sequence"] = "sequence"


class BatchRouterLoss(_RouterLoss):
    """Balance them over what one forward pass sees, as transformers does; the result depends on the split."""

    kind: Literal["batch"] = "batch"
    allow_split: bool = False
    """Accept several micro-batches or ranks: each balances its own tokens, so ranks and budgets change the result."""


class GlobalRouterLoss(_RouterLoss):
    """Balance them over all sequences of an update, for one more forward pass that counts loads."""

    kind: Literal["global"] = "global"


RouterLossConfig = Annotated[
    AutoRouterLoss | NoRouterLoss | SequenceRouterLoss | BatchRouterLoss | GlobalRouterLoss, ByKind("auto")
]
