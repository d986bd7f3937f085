"""The `preference` section: which losses compare a chosen answer with a rejected one.

Of an answer y to a prompt x, r = log policy(y | x) - log reference(y | x), summed over its tokens; `rewards/...` in the
metrics is beta r, or what a loss without a reference has in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from holdfast.config.base import (
    ByKind,
    EvaluatedKwargs,
    FunctionPath,
    Mistake,
    NonNegative,
    OneOrSeveral,
    Positive,
    Section,
)

Lengths = Literal["sum", "mean"]
"""Whether log-probabilities of an answer are summed over its tokens, or averaged."""


class AnyLoss(Section):
    """What every loss that compares answers has."""

    takes_pairs: ClassVar[bool] = True
    """Whether it compares two answers; else it takes single ones with a label."""
    weight: Positive = 1.0
    """Factor in the sum of several losses."""


class _Loss(AnyLoss):
    needs_reference: ClassVar[bool] = True
    """Whether the loss compares with a reference policy."""


class DPOLossConfig(_Loss):
    """-log sigmoid(beta (r_chosen - r_rejected)) (DPO, arXiv:2305.18290, eq. 7)."""

    kind: Literal["dpo"] = "dpo"
    beta: Positive = 0.1
    """The larger, the nearer the policy stays to the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs whose sides are swapped (conservative DPO; Mitchell, 2023, "A note on DPO with noisy
    preferences")."""
    lengths: Lengths = "sum"
    """`mean` divides r by the answer's tokens: length-normalised DPO (Tulu 3, arXiv:2411.15124)."""


class RobustLossConfig(_Loss):
    """DPO without bias where a known share of the pairs is swapped (arXiv:2403.00409)."""

    kind: Literal["robust"] = "robust"
    beta: Positive = 0.1
    """As in `dpo`: the larger, the nearer the policy stays to the reference."""
    label_smoothing: Annotated[float, Field(gt=0, lt=0.5)] = 0.1
    """Assumed share of pairs whose sides are swapped, as in `dpo`."""


class IPOLossConfig(_Loss):
    """(r_chosen - r_rejected - 1 / (2 beta))^2, which no pair drives without end (arXiv:2310.12036, eq. 17)."""

    kind: Literal["ipo"] = "ipo"
    beta: Positive = 0.1
    """The parameter tau of the paper."""
    lengths: Lengths = "sum"
    """`sum` as in the paper; `mean` as in TRL, whose beta then speaks of a difference per token."""


class HingeLossConfig(_Loss):
    """max(0, 1 - beta (r_chosen - r_rejected)): a pair that is ordered well enough teaches nothing.

    SLiC's hinge (arXiv:2305.10425) on DPO's margin: hinge-norm of arXiv:2309.06657.
    """

    kind: Literal["hinge"] = "hinge"
    beta: Positive = 0.1
    """One over the difference of r from which on a pair has no gradient."""


class APOZeroLossConfig(_Loss):
    """1 - sigmoid(beta r_chosen) + sigmoid(beta r_rejected): raises chosen answers (arXiv:2408.06266, eq. 7)."""

    kind: Literal["apo_zero"] = "apo_zero"
    beta: Positive = 0.1
    """As in `dpo`: the larger, the nearer the policy stays to the reference."""


class APODownLossConfig(_Loss):
    """sigmoid(beta r_chosen) + 1 - sigmoid(beta (r_chosen - r_rejected)): lowers both (arXiv:2408.06266, eq. 8)."""

    kind: Literal["apo_down"] = "apo_down"
    beta: Positive = 0.1
    """As in `dpo`: the larger, the nearer the policy stays to the reference."""


class SimPOLossConfig(_Loss):
    """-log sigmoid of beta times the difference of mean log-probabilities less gamma (SimPO, arXiv:2405.14734, eq. 6).

    Without a reference.
    """

    needs_reference = False
    kind: Literal["simpo"] = "simpo"
    beta: Positive = 2.0
    """Factor of the difference between the two sides of a pair."""
    gamma: NonNegative = 1.0
    """Margin that the difference should reach; the paper searches gamma / beta between 0 and 1."""


class ORPOLossConfig(_Loss):
    """Likelihood of the chosen answer, and beta times -log sigmoid of the log odds ratio (arXiv:2403.07691, eq. 6).

    Without a reference. The probability of an answer is the geometric mean of its tokens'.
    """

    needs_reference = False
    kind: Literal["orpo"] = "orpo"
    beta: Positive = 0.1
    """The parameter lambda of the paper."""


class KTOLossConfig(_Loss):
    """Single answers, each desirable or not (KTO, arXiv:2402.01306, section 4).

    weight (1 - sigmoid(beta (r - z0))) for a desirable answer, and with the sign turned for another. z0 is the KL
    divergence of the policy from its reference, measured on prompts with the answer of the next row of the update,
    over all ranks, before each update.
    """

    takes_pairs = False
    kind: Literal["kto"] = "kto"
    beta: Positive = 0.1
    """As in `dpo`: the larger, the nearer the policy stays to the reference."""
    desirable_weight: Positive = 1.0
    """With n_d desirable answers and n_u others, keep n_d desirable_weight / (n_u undesirable_weight) at 1 or a little
    above."""
    undesirable_weight: Positive = 1.0


class UserLossConfig(AnyLoss):
    """A loss of pairs from one file of the user's own."""

    kind: Literal["path"] = "path"
    path: FunctionPath
    """`file.py:function`; the function returns the loss, a holdfast.objectives.pairs.PairLoss."""
    kwargs: EvaluatedKwargs = Field(default_factory=dict)
    """Arguments of the function, by name."""
    needs_reference: bool = True
    """Whether the loss compares with a reference policy."""


BuiltInPairLoss = (
    DPOLossConfig
    | RobustLossConfig
    | IPOLossConfig
    | HingeLossConfig
    | APOZeroLossConfig
    | APODownLossConfig
    | SimPOLossConfig
    | ORPOLossConfig
)
PreferenceLoss = Annotated[BuiltInPairLoss | KTOLossConfig | UserLossConfig, ByKind("dpo")]


class PreferenceConfig(Section):
    """What is made of a pair of answers."""

    loss: Annotated[list[PreferenceLoss], Field(min_length=1), OneOrSeveral()] = [DPOLossConfig()]  # noqa: RUF012
    """One loss or several; several are summed by their weights."""
    sft: NonNegative = 0.0
    """Weight of the chosen answer's mean negative log-likelihood beside them (RPO, arXiv:2404.19733, eq. 1)."""

    @property
    def needs_reference(self) -> bool:
        """Whether one of the losses compares with a reference policy."""
        return any(loss.needs_reference for loss in self.loss)

    @property
    def takes_pairs(self) -> bool:
        """Whether rows hold two answers; else one, with a label."""
        return all(loss.takes_pairs for loss in self.loss)

    @property
    def kinds(self) -> list[str]:
        """The losses' names."""
        return [loss.kind for loss in self.loss]

    def mistakes(self) -> Iterator[Mistake]:
        """Yield losses that do not go together."""
        if len(self.loss) > 1 and "kto" in self.kinds:
            pair_kinds = ", ".join(kind for kind in self.kinds if kind != "kto")
            yield "loss", f"kto takes single answers with a label, {pair_kinds} pairs of answers; keep one of the two"
        twice = next((kind for kind in self.kinds if self.kinds.count(kind) > 1), None)
        if twice is not None:
            yield "loss", f"{twice} stands there twice, and metrics could not tell the two apart; keep one of them"
