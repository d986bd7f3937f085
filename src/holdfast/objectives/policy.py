"""The loss of a policy: a surrogate, and what holds the policy near its reference, its sampler and its entropy.

    term = keep correction surrogate(A, r)  +  kl_coefficient KL  -  entropy_coefficient keep_entropy H

`keep` and `correction` are constants of the update: no denominator changes with them. KL acts on every token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from holdfast.config.sections.policy import (
    BuiltInObjective,
    CISPOConfig,
    ClipConfig,
    CorrectionConfig,
    EntropyConfig,
    GSPOConfig,
    GSPOTokenConfig,
    KLConfig,
    NoCorrectionConfig,
    OffPolicyMaskConfig,
    ReinforceConfig,
    SAPOConfig,
)
from holdfast.objectives.base import Tokens, ratio
from holdfast.objectives.clip import GSPO, Clip, GSPOToken
from holdfast.objectives.correction import (
    Mismatch,
    correct,
    corrects_sequences,
    kept_by_policy,
    mismatch,
    mismatch_sums,
)
from holdfast.objectives.kl import kl_terms, kl_total, shaped_advantages
from holdfast.objectives.ratios import bounded_exp, carried, log_ratio_to_proximal, proximal_logprobs
from holdfast.objectives.surrogates import CISPO, SAPO, Actions, Reinforce, Surrogate
from holdfast.types import Scores


@dataclass(frozen=True)
class PolicyGradient:
    """A surrogate with its regularisers.

    Of `tokens.per_token` it reads `advantages`; `sampler_logprobs`; `reference_logprobs` if `needs_reference`;
    `proximal_logprobs` if several updates are made of one rollout (absent, the proximal policy is the policy, and
    ratios are exactly 1); `entropy_mask`, bool, if `needs_entropy_mask`. Each is [N].
    """

    surrogate: Surrogate
    kl: KLConfig = KLConfig()
    """Its coefficient is the present one, see `with_coefficients`."""
    entropy: EntropyConfig = EntropyConfig()
    """Likewise."""
    correction: CorrectionConfig = NoCorrectionConfig()
    off_policy_mask: OffPolicyMaskConfig = OffPolicyMaskConfig()
    shapes_advantages: bool = True
    """Whether a KL outside the loss is taken from advantages here; else they were made of rewards that hold it."""

    @property
    def separable(self) -> bool:
        """Whether each token's term needs its own scores only.

        Whatever is summed over a sequence, be it of constants, is not: the head hands over chunks that cut sequences.
        """
        return not (
            self.surrogate.needs_whole_sequences
            or corrects_sequences(self.correction)
            or self.off_policy_mask.max_kl is not None
            or (self.needs_reference and self.kl.where == "reward_to_go")
        )

    @property
    def needs_entropy(self) -> bool:
        """Whether the terms hold the entropy of the policy; an adaptive bonus does even while its weight is 0."""
        return self.entropy.coefficient > 0 or self.entropy.target is not None

    @property
    def needs_reference(self) -> bool:
        """Whether tokens must carry `reference_logprobs`."""
        return self.kl.coefficient > 0

    @property
    def charged_to_rewards(self) -> bool:
        """Whether rewards must hold the KL of each token, taken between proximal policy and reference, beforehand."""
        return self.needs_reference and self.kl.where != "loss" and not self.shapes_advantages

    @property
    def needs_sampler(self) -> bool:
        """Whether terms, and not only metrics, need `sampler_logprobs`."""
        return not isinstance(self.correction, NoCorrectionConfig) or self.off_policy_mask.max_kl is not None

    @property
    def needs_entropy_mask(self) -> bool:
        """Whether tokens must carry `entropy_mask`: entropies, and their quantile, are known before the update."""
        return self.entropy.top_quantile < 1

    def with_coefficients(self, kl: float, entropy: float) -> Self:
        """Return the objective with other weights of KL and entropy, as controllers set them."""
        return replace(
            self,
            kl=self.kl.model_copy(update={"coefficient": kl}),
            entropy=self.entropy.model_copy(update={"coefficient": entropy}),
        )

    def token_terms(self, logprobs: Tensor, entropy: Tensor | None, tokens: Tokens) -> Tensor:
        """Return [n] terms, differentiable in `logprobs` and, with a bonus, in `entropy`."""
        actions = self._actions(logprobs, tokens)
        # Ratios are bounded, so what a weight of 0 drops is finite: 0 x inf would be NaN.
        terms = self.surrogate.terms(actions) * self._weights(actions)
        if self.needs_reference and self.kl.where == "loss":
            reference = carried("reference_logprobs", logprobs, tokens)
            terms = terms + self.kl.coefficient * kl_terms(self.kl, logprobs, reference, actions.log_ratio)
        if self.needs_entropy:
            assert entropy is not None
            trained = torch.where(self._entropy_mask(actions), entropy, 0.0)
            terms = terms - self.entropy.coefficient * trained
        return terms

    def sums(self, scores: Scores, tokens: Tokens) -> dict[str, Tensor]:
        """Return metrics over scored tokens whatever their weights: those of the surrogate, of the sampler and

        - kl: KL(policy || reference) per token in nats, estimator k3 whatever the loss uses, without any bound.
        - entropy: in nats, where it was computed.
        - ratio/mean, ratio/deviation_mean: policy over proximal policy, and its mean distance from 1.
        - off_policy/dropped_mean, entropy_mask/dropped_mean: share of tokens whose surrogate is dropped.
        """
        actions = self._actions(scores.logprobs, tokens)
        count = float(scores.logprobs.numel())
        ratios = bounded_exp(actions.log_ratio).to(torch.float64)
        differences = self._mismatch(actions)
        sums = {
            "ratio/mean": ratio(ratios.sum(), count),
            "ratio/deviation_mean": ratio((ratios - 1).abs().sum(), count),
            **self.surrogate.sums(actions),
            **mismatch_sums(differences, correct(self.correction, differences, tokens)),
        }
        if self.needs_reference:
            reference = carried("reference_logprobs", scores.logprobs, tokens)
            sums["kl"] = ratio(kl_total(scores.logprobs, reference), count)
        if scores.entropy is not None:
            sums["entropy"] = ratio(scores.entropy.sum(dtype=torch.float64), count)
        if self.off_policy_mask.max_kl is not None:
            sums["off_policy/dropped_mean"] = ratio((~self._on_policy(actions)).sum(), count)
        if self.needs_entropy_mask:
            sums["entropy_mask/dropped_mean"] = ratio((~self._entropy_mask(actions)).sum(), count)
        return sums

    def _actions(self, logprobs: Tensor, tokens: Tokens) -> Actions:
        advantages = carried("advantages", logprobs, tokens)
        if self.shapes_advantages and self.needs_reference and self.kl.where != "loss":
            proximal = proximal_logprobs(logprobs, tokens)
            reference = carried("reference_logprobs", logprobs, tokens)
            advantages = shaped_advantages(self.kl, self.kl.coefficient, advantages, proximal, reference, tokens)
        return Actions(logprobs, log_ratio_to_proximal(logprobs, tokens), advantages, tokens)

    def _weights(self, actions: Actions) -> Tensor:
        """Return [N] constants that multiply the surrogate; 0 where it is dropped."""
        mask = (self._entropy_mask(actions) & self._on_policy(actions)).to(actions.logprobs.dtype)
        if not self.needs_sampler:
            return mask
        return mask * correct(self.correction, self._mismatch(actions), actions.tokens).weights

    def _entropy_mask(self, actions: Actions) -> Tensor:
        if not self.needs_entropy_mask:
            return torch.ones_like(actions.logprobs, dtype=torch.bool)
        return carried("entropy_mask", actions.logprobs, actions.tokens) > 0

    def _on_policy(self, actions: Actions) -> Tensor:
        if self.off_policy_mask.max_kl is None:
            return torch.ones_like(actions.logprobs, dtype=torch.bool)
        sampler = carried("sampler_logprobs", actions.logprobs, actions.tokens)
        # Whether a sequence failed is what its reward says: a KL taken from advantages can turn the sign of a good one.
        earned = carried("advantages", actions.logprobs, actions.tokens)
        return kept_by_policy(self.off_policy_mask.max_kl, actions.logprobs, sampler, earned, actions.tokens)

    def _mismatch(self, actions: Actions) -> Mismatch:
        proximal = proximal_logprobs(actions.logprobs, actions.tokens)
        if not self.needs_sampler and "sampler_logprobs" not in actions.tokens.per_token:
            nothing = torch.full_like(proximal, torch.nan)  # rollouts of an engine without log-probabilities
            return mismatch(proximal, nothing)
        return mismatch(proximal, carried("sampler_logprobs", actions.logprobs, actions.tokens))


def surrogate_of(config: BuiltInObjective) -> Surrogate:
    """Return the surrogate that a section names."""
    match config:
        case ClipConfig():
            return Clip(config.low, config.high, config.dual_clip if config.delta is None else config.delta)
        case GSPOConfig():
            return GSPO(config.low, config.high)
        case GSPOTokenConfig():
            return GSPOToken(config.low, config.high)
        case CISPOConfig():
            return CISPO(config.low, config.high)
        case SAPOConfig():
            return SAPO(config.tau_positive, config.tau_negative)
        case ReinforceConfig():
            return Reinforce()


def build_policy_objective(
    surrogate: BuiltInObjective,
    kl: KLConfig,
    entropy: EntropyConfig,
    correction: CorrectionConfig,
    off_policy_mask: OffPolicyMaskConfig,
) -> PolicyGradient:
    """Return the objective that five sections describe."""
    return PolicyGradient(surrogate_of(surrogate), kl, entropy, correction, off_policy_mask)
