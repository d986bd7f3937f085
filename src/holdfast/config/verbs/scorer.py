"""The tree of `holdfast reward`: pairs of answers, and a model that learns to score them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from holdfast.config.base import ByKind, Mistake, NonNegative, OneOrSeveral
from holdfast.config.sections.preference import AnyLoss, PreferenceConfig
from holdfast.config.verbs.dpo import DPOConfig


class BradleyTerryConfig(AnyLoss):
    """-log sigmoid(score_chosen - score_rejected) (Bradley & Terry, 1952; Ouyang et al., arXiv:2203.02155, eq. 1)."""

    needs_reference: ClassVar[bool] = False
    kind: Literal["bradley_terry"] = "bradley_terry"
    center: NonNegative = 0.0
    """Weight of (score_chosen + score_rejected)^2, which keeps scores near 0; pairs alone leave their level open
    (arXiv:2312.09244, appendix A)."""


ScorerLoss = Annotated[BradleyTerryConfig, ByKind("bradley_terry")]


class ScorerPreferenceConfig(PreferenceConfig):
    """What is made of a pair of scores."""

    loss: Annotated[list[ScorerLoss], Field(min_length=1, max_length=1), OneOrSeveral()]  # type: ignore[assignment]
    """`bradley_terry`; it tells a file of this verb from one of `holdfast dpo`."""


class ScorerConfig(DPOConfig):
    """Training of a reward model: one score for a prompt and its answer."""

    verb = "reward"
    scores = True
    preference: ScorerPreferenceConfig

    def mistakes(self) -> Iterator[Mistake]:
        """Yield what policies have and reward models have not."""
        yield from super().mistakes()
        if self.preference.sft:
            yield "preference.sft", "a reward model has no likelihood of an answer; leave it out"
        if self.evaluation.completions is not None:
            yield "evaluation.completions", "a reward model scores answers and writes none; leave it out"
