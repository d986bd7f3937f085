"""The `objective` section: which loss is summed over the trained tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from holdfast.config.base import ByKind, EvaluatedKwargs, FunctionPath, ProperFraction, Section


class NLLConfig(Section):
    """Negative log-likelihood."""

    kind: Literal["nll"] = "nll"
    label_smoothing: ProperFraction = 0.0
    """Share of each label that is spread over the whole vocabulary alike (arXiv:1512.00567, section 7); the metric
    `nll` is without it."""


class DFTConfig(Section):
    """Dynamic fine-tuning: the likelihood weighted by the token's own probability (Wu et al., arXiv:2508.05629)."""

    kind: Literal["dft"] = "dft"


class UserObjectiveConfig(Section):
    """A loss from one file of the user's own."""

    kind: Literal["path"] = "path"
    path: FunctionPath
    """`file.py:function`; the function returns the loss, a holdfast.objectives.base.Objective."""
    kwargs: EvaluatedKwargs = Field(default_factory=dict)
    """Arguments of the function, by name."""


SupervisedObjective = Annotated[NLLConfig | DFTConfig | UserObjectiveConfig, ByKind("nll")]
