"""What a policy is trained by: the surrogate, KL, entropy, and the correction for the sampler.

A rule of one section stands here; rules between sections stand with the roots.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from holdfast.config.base import (
    ByKind,
    Fraction,
    Mistake,
    NonNegative,
    Positive,
    PositiveInt,
    Section,
)
from holdfast.config.sections.algorithm import UserObjectiveConfig

RatioLevel = Literal["token", "sequence"]
"""Whether a ratio is a token's own, or the geometric mean over its sequence."""


class ClipConfig(Section):
    """PPO's clipped ratio per token: GRPO, and DAPO with high: 0.28 (arXiv:2402.03300, 2503.14476)."""

    kind: Literal["clip"] = "clip"
    low: Fraction = 0.2
    """A token whose advantage is negative has no gradient below the ratio 1 - low."""
    high: Positive = 0.2
    """A token whose advantage is positive has no gradient above the ratio 1 + high."""
    dual_clip: Positive | None = None
    """A token whose advantage is negative has no gradient above this ratio, which is over 1 (arXiv:1912.09729)."""
    delta: Positive | None = None
    """The same bound as INTELLECT-2 writes it, over 1 + high (arXiv:2505.07291)."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield bounds that would clip what is not off-policy, or say one thing twice."""
        if self.dual_clip is not None and self.delta is not None:
            yield "delta", "delta and dual_clip both bound the ratio of negative advantages; keep one of them"
        if self.dual_clip is not None and self.dual_clip <= 1:
            yield "dual_clip", f"{self.dual_clip} would clip the policy that sampled; use more than 1, such as 3"
        if self.delta is not None and self.delta <= 1 + self.high:
            yield "delta", f"{self.delta} is not above 1 + high = {1 + self.high}; raise delta, to 4 for example"


class GSPOConfig(Section):
    """One ratio per sequence, the geometric mean of its tokens' (arXiv:2507.18071); average it by sequence_mean."""

    kind: Literal["gspo"] = "gspo"
    low: Fraction = 3e-4
    """A sequence whose advantage is negative has no gradient below the ratio 1 - low."""
    high: Positive = 4e-4
    """A sequence whose advantage is positive has no gradient above the ratio 1 + high."""


class GSPOTokenConfig(Section):
    """GSPO's ratio with each token's own gradient, for advantages that differ within a sequence (arXiv:2507.18071)."""

    kind: Literal["gspo_token"] = "gspo_token"
    low: Fraction = 3e-4
    """A token whose advantage is negative has no gradient below the sequence's ratio 1 - low."""
    high: Positive = 4e-4
    """A token whose advantage is positive has no gradient above the sequence's ratio 1 + high."""


class CISPOConfig(Section):
    """The ratio as a bounded weight without a gradient, so that no token is left out (arXiv:2506.13585)."""

    kind: Literal["cispo"] = "cispo"
    low: Fraction = 1.0
    """The weight is at least 1 - low; 1 means no bound from below, as in the paper."""
    high: Positive = 4.0
    """The weight is at most 1 + high: relative to the ratio 1, so 4 caps weights at 5 (ScaleRL, arXiv:2510.13786)."""


class SAPOConfig(Section):
    """A soft gate around the ratio 1 instead of a clip (arXiv:2511.20347)."""

    kind: Literal["sapo"] = "sapo"
    tau_positive: Positive = 1.0
    """Temperature where the advantage is positive: the larger, the narrower the gate."""
    tau_negative: Positive = 1.05
    """Temperature elsewhere."""


class DPPOConfig(Section):
    """The ratio as a weight without a gradient, for tokens whose probability moved little (DPPO, arXiv:2602.04879).

    A bound on the ratio holds rare tokens back and lets frequent ones go far; this one is on what of the distribution
    moved, seen as two outcomes: the token, or another.
    """

    kind: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """`tv`: by how much the token's probability changed; `kl`: the KL divergence of the two outcomes, for which the
    paper's bound is 0.05."""
    low: Positive = 0.15
    """A token whose advantage is negative has no gradient where its probability fell by more."""
    high: Positive = 0.15
    """A token whose advantage is positive has no gradient where its probability rose by more."""
    cap: Positive = 20.0
    """Largest weight."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a weight that would change the first update."""
        if self.cap < 1:
            yield "cap", f"{self.cap:g} would weigh down the policy that sampled; use 1 or more"


class ClipCovConfig(Section):
    """PPO's clipped ratio without a random few of the tokens that lower the entropy most (Clip-Cov, arXiv:2505.22617).

    A token's covariance is (log p - mean) (advantage - mean) over the tokens of an update, before the rollout's first
    one. Costs a forward pass.
    """

    kind: Literal["clip_cov"] = "clip_cov"
    low: Fraction = 0.2
    """Lower bound, as in `clip`."""
    high: Positive = 0.2
    """Upper bound, as in `clip`."""
    share: Annotated[float, Field(gt=0, le=1)] = 2e-4
    """Share of all tokens that are left out; at least one, where there is one to leave out."""
    covariance_low: float = 1.0
    """Tokens of a higher covariance may be left out."""
    covariance_high: float = 5.0
    """Tokens of a lower covariance may be left out."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a range without a number."""
        if self.covariance_low >= self.covariance_high:
            yield "covariance_low", f"{self.covariance_low:g} is not below covariance_high={self.covariance_high:g}"


class KLCovConfig(Section):
    """The plain ratio, and a penalty where tokens lower the entropy most (KL-Cov, arXiv:2505.22617).

    Those of highest covariance, as in `clip_cov`, pay |log policy - log proximal policy|. Costs a forward pass.
    """

    kind: Literal["kl_cov"] = "kl_cov"
    share: Annotated[float, Field(gt=0, le=1)] = 2e-4
    """Share of all tokens that are penalised; at least one."""
    coefficient: Positive = 1.0
    """Weight of the penalty."""


class ReinforceConfig(Section):
    """Advantage times log-probability, without a ratio (Williams, 1992): right for one update per rollout."""

    kind: Literal["reinforce"] = "reinforce"


ByCovariance = ClipCovConfig | KLCovConfig
"""Those that choose tokens by their covariance before an update."""
BuiltInObjective = (
    ClipConfig | GSPOConfig | GSPOTokenConfig | CISPOConfig | SAPOConfig | DPPOConfig | ByCovariance | ReinforceConfig
)
PolicyObjective = Annotated[BuiltInObjective | UserObjectiveConfig, ByKind("clip")]

KLEstimator = Literal["k1", "k2", "k3", "abs", "straight_through"]


class KLConfig(Section):
    """How far the policy may move from the reference, KL(policy || reference) per token in nats."""

    coefficient: NonNegative = 0.0
    """Weight of the term; 0: no reference policy. With a target, where the weight starts."""
    estimator: KLEstimator = "k3"
    """From d = log reference - log policy: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1, abs = |d| (Schulman, 2020,
    "Approximating KL divergence"); straight_through has the value of k3 and the gradient of k2."""
    importance_weighted: bool = False
    """Multiply by the ratio of policy and proximal policy, which makes the gradient of k1 and k3 that of the KL
    divergence (DeepSeek-V3.2, arXiv:2512.02556, section 3.1)."""
    where: Literal["loss", "reward", "reward_to_go"] = "loss"
    """`reward` takes coefficient x KL of a token from its advantage; `reward_to_go` takes that of the token and all
    later ones, which is the policy gradient of the sequence's KL (REINFORCE++, arXiv:2501.03262)."""
    target: Positive | None = None
    """Steer the coefficient towards this KL per token, in nats (Ziegler et al., arXiv:1909.08593, section 2.2)."""
    horizon: PositiveInt = 10_000
    """Completions over which an error of 20 % or more moves the coefficient by about 20 %."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield estimators without the right gradient, and control of nothing."""
        if self.target is not None and self.coefficient == 0:
            yield "coefficient", "0 stays 0 however far the KL is from its target; start at 0.05, for example"
        if self.where == "loss":
            if self.estimator == "k1" and not self.importance_weighted:
                yield (
                    "estimator",
                    "the gradient of k1 in the loss is zero on average; use where: reward_to_go, estimator: k2, or "
                    "importance_weighted: true",
                )
            return
        if self.importance_weighted:
            yield "importance_weighted", f"where: {self.where} has no gradient to weight; leave it at false"
        if self.estimator == "straight_through":
            yield "estimator", f"where: {self.where} has no gradient to pass through; use k1 or k3"


class EntropyConfig(Section):
    """Keep the policy exploring, by a bonus or by the choice of trained tokens."""

    coefficient: NonNegative = 0.0
    """Weight of the mean entropy in nats, taken from the loss. With a target, where the weight starts."""
    target: Positive | None = None
    """Entropy in nats per token: below it the weight grows by `step` and acts, above it it shrinks and rests
    (Skywork-OR1, arXiv:2505.22312)."""
    step: Positive = 0.005
    """How much the weight changes after each update."""
    lowest: NonNegative = 0.0
    """Smallest value of the weight."""
    highest: Positive = 1.0
    """Largest value of the weight."""
    top_quantile: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of tokens, those of highest entropy, that surrogate and bonus train; the paper's choice is 0.2
    (arXiv:2506.01939). Costs a pass over the batch before the first update."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a range that is empty or does not hold the start."""
        if self.lowest > self.highest:
            yield "lowest", f"{self.lowest} is above highest={self.highest}; lower it"
        elif self.target is not None and not self.lowest <= self.coefficient <= self.highest:
            yield (
                "coefficient",
                f"{self.coefficient} is not between lowest={self.lowest} and highest={self.highest}; start inside",
            )


class NoCorrectionConfig(Section):
    """Take the sampler's probabilities for the trainer's."""

    kind: Literal["off"] = "off"


class TruncateConfig(Section):
    """Weight tokens by trainer over sampler probability, up to a cap (Yao et al., 2025, "Your efficient RL framework
    secretly brings you off-policy RL training")."""

    kind: Literal["truncate"] = "truncate"
    cap: Positive = 2.0
    """Largest weight."""
    level: RatioLevel = "token"
    """`sequence`: the geometric mean over the sequence, so that length alone never reaches the cap."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a cap that changes what trainer and sampler agree about."""
        if self.cap < 1:
            yield "cap", f"a cap of {self.cap:g} gives tokens weight {self.cap:g} where both agree; use 1 or more"


class MaskConfig(Section):
    """Drop what trainer and sampler disagree about, weight the rest (IcePop, arXiv:2510.18855)."""

    kind: Literal["mask"] = "mask"
    low: NonNegative = 0.5
    """Smallest ratio of trainer over sampler probability that is trained."""
    high: Positive = 5.0
    """Largest ratio that is trained. For level: sequence, whose ratios lie near 1, low: 0.99 and high: 1.01 drop as
    much.
    """
    level: RatioLevel = "token"
    """`sequence` keeps or drops whole sequences by the geometric mean of their ratios."""
    weighted: bool = True
    """Weight the tokens that stay by their ratio; `false` weights them by 1."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a range that drops what trainer and sampler agree about."""
        if not self.low <= 1 <= self.high:
            yield "low", f"the range {self.low} to {self.high} leaves out the ratio 1, so all is dropped; widen it"


CorrectionConfig = Annotated[NoCorrectionConfig | TruncateConfig | MaskConfig, ByKind("off")]


class OffPolicyMaskConfig(Section):
    """Drop failed sequences that the policy would no longer write (DeepSeek-V3.2, arXiv:2512.02556, section 3.1)."""

    max_kl: Positive | None = None
    """A sequence of negative advantage is dropped where log sampler - log policy, averaged over its tokens, exceeds
    this many nats; null: none is dropped."""
