"""The `advantage` section: what a completion's reward is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from holdfast.config.base import (
    AtLeastTwo,
    ByKind,
    Fraction,
    FunctionPath,
    Kwargs,
    Mistake,
    NonNegative,
    PositiveFraction,
    Section,
)


class _Advantage(Section):
    tolerance: NonNegative = 1e-6
    """Rewards of a group that lie within this range count as identical, and give exactly 0."""

    @property
    def smallest_group(self) -> int:
        """Fewest scored completions of a prompt that have an advantage."""
        return 2

    @property
    def needs_greedy(self) -> bool:
        """Whether the reward of the greedy completion of each prompt is needed."""
        return False

    @property
    def turn_discount(self) -> float | None:
        """The discount of rewards of later turns; None where all turns of an episode have its advantage."""
        return None


class _Scaled(_Advantage):
    epsilon: NonNegative = 1e-6
    """Added to the standard deviation that advantages are divided by."""
    combine: Literal["sum_then_normalise", "normalise_then_sum"] = "sum_then_normalise"
    """`normalise_then_sum` forms the advantage of every reward by itself and divides their weighted sum by its
    standard deviation over the batch, so that a reward of small range still counts (GDPO, arXiv:2601.05242)."""


class _WithinGroup(_Advantage):
    turns: Literal["episode", "discounted"] = "episode"
    """What a turn in an `environment` is compared by: the reward of its episode, or its own return, which is the
    discounted sum of the rewards from this turn on (arXiv:2511.14846), against the returns of the same turn in the
    other episodes of its group."""
    discount: PositiveFraction = 1.0
    """Of `turns: discounted`: the factor of a reward for each turn that lies before it."""

    @property
    def turn_discount(self) -> float | None:
        """The discount of rewards of later turns; None where all turns of an episode have its advantage."""
        return self.discount if self.turns == "discounted" else None

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a discount of nothing."""
        if self.turns == "episode" and self.discount != 1.0:
            yield "discount", "all turns have the reward of their episode; set turns: discounted, or leave it out"


class GRPOAdvantageConfig(_Scaled, _WithinGroup):
    """(reward - group mean) / group standard deviation (arXiv:2402.03300, section 4.1.2)."""

    kind: Literal["grpo"] = "grpo"

    def mistakes(self) -> Iterator[Mistake]:
        """Yield returns of turns that would have to be formed reward by reward."""
        yield from super().mistakes()
        if self.turns == "discounted" and self.combine == "normalise_then_sum":
            yield "combine", "normalise_then_sum scales rewards of whole episodes; leave it out with turns: discounted"


class BatchStdAdvantageConfig(_Scaled):
    """(reward - group mean) / standard deviation of all rewards of the batch (arXiv:2508.08221)."""

    kind: Literal["batch_std"] = "batch_std"


class ReinforcePPAdvantageConfig(_Scaled):
    """(reward - batch mean) / batch standard deviation (REINFORCE++, arXiv:2501.03262)."""

    kind: Literal["reinforce_pp"] = "reinforce_pp"

    @property
    def smallest_group(self) -> int:
        """The batch is the baseline, so one completion of a prompt is enough."""
        return 1


class ReinforcePPBaselineAdvantageConfig(_Scaled):
    """(reward - group mean) / its own standard deviation over the batch (REINFORCE++-baseline, arXiv:2501.03262)."""

    kind: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"


class DrGRPOAdvantageConfig(_WithinGroup):
    """Reward - group mean: no weight on questions that are easy or hard (Dr. GRPO, arXiv:2503.20783)."""

    kind: Literal["dr_grpo"] = "dr_grpo"


class RLOOAdvantageConfig(_WithinGroup):
    """Reward - mean of the group's other rewards (arXiv:2402.14740)."""

    kind: Literal["rloo"] = "rloo"


class OPOAdvantageConfig(_Advantage):
    """Reward - mean of the group's rewards weighted by length (OPO, arXiv:2505.23585).

    The baseline of least variance where the gradients of all tokens are alike in size and orthogonal. Made for one
    update per rollout, as in `objective: reinforce`.
    """

    kind: Literal["opo"] = "opo"


class MaxRLAdvantageConfig(_Advantage):
    """(reward - group mean) / group mean, for rewards of 0 and 1 (MaxRL, arXiv:2602.02710).

    The gradient of the log-likelihood of success, up to the order of the group's size. A group whose mean is not above
    0 teaches nothing.
    """

    kind: Literal["maxrl"] = "maxrl"


class GPGAdvantageConfig(_Advantage):
    """(reward - group mean) * groups / groups whose rewards differ, both of the batch (GPG, arXiv:2504.02546).

    The factor makes up for groups of identical rewards, which add nothing to the gradient and count in its mean. Made
    for one update per rollout, as in `objective: reinforce`.
    """

    kind: Literal["gpg"] = "gpg"


class ReMaxAdvantageConfig(_Advantage):
    """Reward - reward of the greedy completion (ReMax, arXiv:2310.10505)."""

    kind: Literal["remax"] = "remax"

    @property
    def smallest_group(self) -> int:
        """The greedy completion is the baseline, so one sampled completion is enough."""
        return 1

    @property
    def needs_greedy(self) -> bool:
        """One more completion per prompt is decoded greedily and scored, not trained."""
        return True


class PassAtKAdvantageConfig(_Advantage):
    """The advantage of groups of k completions of which one must be right (arXiv:2508.10751, section 2.4)."""

    kind: Literal["pass_at_k"] = "pass_at_k"
    k: AtLeastTwo = 4
    """Number of completions of which one must be right; below the group size."""
    threshold: float = 0.5
    """A completion is right if its reward lies above."""

    @property
    def smallest_group(self) -> int:
        """A group of k has no other k to compare with."""
        return self.k + 1


class GAEAdvantageConfig(_Advantage):
    """Generalised advantage estimates per token, from a `critic` (Schulman et al., arXiv:1506.02438, eq. 16): PPO."""

    kind: Literal["gae"] = "gae"
    gamma: Fraction = 1.0
    """Discount of a reward for each token that lies before it."""
    lam: Fraction = 0.95
    """The paper's lambda: 1 compares the return with the value, 0 trusts the value of the next token."""
    whiten: bool = True
    """Bring the advantages of all tokens of the rollout batch to mean 0 and standard deviation 1."""
    epsilon: NonNegative = 1e-8
    """Added to the standard deviation."""

    @property
    def smallest_group(self) -> int:
        """The critic is the baseline, so one completion of a prompt is enough."""
        return 1


class UserAdvantageConfig(_Advantage):
    """Advantages from a function in one file of the user's own."""

    kind: Literal["path"] = "path"
    path: FunctionPath
    """`file.py:function`; takes a holdfast.advantages.user.Groups and returns one number for each completion. It is
    called once a step, on one rank, and once before step 1 with tiny groups; what it keeps to itself is not saved."""
    kwargs: Kwargs = Field(default_factory=dict)
    """Further arguments of the function, by name."""

    @property
    def smallest_group(self) -> int:
        """What it compares is its own business."""
        return 1


ScaledAdvantageConfig = (
    GRPOAdvantageConfig | BatchStdAdvantageConfig | ReinforcePPAdvantageConfig | ReinforcePPBaselineAdvantageConfig
)
"""Those that divide by a standard deviation, so that the order of summing and scaling matters."""

AdvantageConfig = Annotated[
    GRPOAdvantageConfig
    | DrGRPOAdvantageConfig
    | RLOOAdvantageConfig
    | OPOAdvantageConfig
    | MaxRLAdvantageConfig
    | GPGAdvantageConfig
    | ReinforcePPAdvantageConfig
    | ReinforcePPBaselineAdvantageConfig
    | ReMaxAdvantageConfig
    | PassAtKAdvantageConfig
    | BatchStdAdvantageConfig
    | GAEAdvantageConfig
    | UserAdvantageConfig,
    ByKind("grpo"),
]
