"""The loss of policy optimisation: a surrogate with KL and entropy terms, and a correction for the sampler.

    term = keep correction surrogate(A, r)  +  kl_coefficient KL  -  entropy_coefficient keep_entropy H

`keep` and `correction` are constants of the update: no denominator changes with them. KL acts on every token.

An engine's log-probabilities differ from the trainer's by kernels, precision and age. A correction multiplies the
surrogate of a token by a coefficient without a gradient.

Which tokens lower the entropy most is told before an update by the covariance that drives it: Cui et al., "The Entropy
Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv:2505.22617). The covariance of a token is
(log p - mean log p) (A - mean A) over the N tokens of an update. Clip-Cov leaves a random few of those with a high one
out of the loss; KL-Cov holds the highest near the policy before. There N and the means are of a micro-batch and log p
is the present policy's; here they are of the whole update, over all ranks, and log p is that of the proximal policy, so
that no split changes which tokens are chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.config.sections.policy import (
    BuiltInObjective,
    CISPOConfig,
    ClipConfig,
    ClipCovConfig,
    CorrectionConfig,
    DPPOConfig,
    EntropyConfig,
    GSPOConfig,
    GSPOTokenConfig,
    KLConfig,
    KLCovConfig,
    MaskConfig,
    NoCorrectionConfig,
    OffPolicyMaskConfig,
    ReinforceConfig,
    SAPOConfig,
    TruncateConfig,
)
from holdfast.objectives.base import (
    Tokens,
    bounded_exp,
    carried,
    log_ratio_to_proximal,
    proximal_logprobs,
    ratio,
    sequence_mean,
    sequence_sum,
)
from holdfast.objectives.regularisers import kl_terms, kl_total, shaped_advantages
from holdfast.objectives.surrogates import (
    CISPO,
    DPPO,
    GSPO,
    SAPO,
    Actions,
    Clip,
    ClipCov,
    GSPOToken,
    KLCov,
    Reinforce,
    Surrogate,
)
from holdfast.types import Scores


class Mismatch(NamedTuple):
    """Differences between the trainer's and the sampler's log-probabilities, detached."""

    log_ratio: Tensor
    """[N] log proximal policy - log sampler, in nats; 0 where the sampler gave no finite number"""
    is_finite: Tensor
    """[N] bool, whether the sampler gave a finite number"""


class Correction(NamedTuple):
    """Factors of the surrogate of each token, which correct for the sampler."""

    weights: Tensor
    """[N], 0 where a token is dropped"""
    changed: Tensor
    """[N] bool, dropped or capped"""


def mismatch(proximal: Tensor, sampler: Tensor) -> Mismatch:
    """Compare the log-probabilities of trainer and sampler, both [N]. A token without evidence counts as agreed."""
    is_finite = torch.isfinite(sampler)
    return Mismatch(torch.where(is_finite, proximal - sampler, 0.0).detach(), is_finite)


def correct(config: CorrectionConfig, differences: Mismatch, tokens: Tokens) -> Correction:
    """Return the coefficient of every token.

    truncate: min(r, cap), r = trainer / sampler: Yao et al. (2025), fengyao.notion.site/off-policy-rl. mask: r within
    [low, high], 0 outside: IcePop (arXiv:2510.18855). At level sequence r is the geometric mean over the sequence's
    tokens: the product of the ratios would leave any range with length alone (TRL #4772). That needs whole sequences.
    """
    level = differences.log_ratio
    if corrects_sequences(config):
        level = sequence_mean(level, tokens)
    ratios = bounded_exp(level)
    match config:
        case NoCorrectionConfig():
            return Correction(torch.ones_like(ratios), torch.zeros_like(differences.is_finite))
        case TruncateConfig(cap=cap):
            return Correction(ratios.clamp(max=cap), ratios > cap)
        case MaskConfig(low=low, high=high, weighted=weighted):
            outside = (ratios < low) | (ratios > high)
            return Correction(torch.where(outside, 0.0, ratios if weighted else 1.0), outside)


def corrects_sequences(config: CorrectionConfig) -> bool:
    """Return whether a token's coefficient depends on the rest of its sequence."""
    return not isinstance(config, NoCorrectionConfig) and config.level == "sequence"


def kept_by_policy(max_kl: float, logprobs: Tensor, sampler: Tensor, advantages: Tensor, tokens: Tokens) -> Tensor:
    """Return [N] bool: False for sequences of negative advantage whose mean log sampler - log policy exceeds `max_kl`.

    DeepSeek-V3.2 (arXiv:2512.02556), eqs. 8 and 9. Of advantages that differ within a sequence the sum decides.
    """
    away = -mismatch(logprobs, sampler).log_ratio
    failed = sequence_sum(advantages, tokens) < 0
    return ~(failed & (sequence_mean(away, tokens) > max_kl))


def mismatch_sums(differences: Mismatch, correction: Correction) -> dict[str, Tensor]:
    """Return metrics of trainer against sampler, over tokens whose sampler log-probability is known.

    - sampling/importance_sampling_ratio/mean: the ratio before any correction; TRL reports it after.
    - sampling/sampling_logp_difference/mean: its absolute logarithm, in nats.
    - sampling/mismatch_kl: k3 of KL(sampler || trainer) in nats, which the sampler's own tokens estimate.
    - correction/changed_mean: share of tokens dropped by `mask` or capped by `truncate`.
    """
    count = differences.is_finite.sum()
    log_ratio = differences.log_ratio.to(torch.float64)
    ratios = torch.where(differences.is_finite, log_ratio.exp(), 0.0)
    k3 = torch.where(differences.is_finite, log_ratio.exp() - log_ratio - 1, 0.0)
    return {
        "sampling/importance_sampling_ratio/mean": ratio(ratios.sum(), count),
        "sampling/sampling_logp_difference/mean": ratio(log_ratio.abs().sum(), count),
        "sampling/mismatch_kl": ratio(k3.sum(), count),
        "correction/changed_mean": ratio(correction.changed.sum(), float(differences.is_finite.numel())),
    }


@dataclass(frozen=True)
class PolicyGradient:
    """The loss of a policy: a surrogate with its regularisers.

    Of `tokens.per_token` it reads `advantages`; `sampler_logprobs`; `reference_logprobs` if `needs_reference`;
    `proximal_logprobs` if several updates are made of one rollout (absent, the proximal policy is the policy, and
    ratios are exactly 1); `entropy_mask`, bool, if `needs_entropy_mask`. Each is [N].
    """

    surrogate: Surrogate
    """Loss without regularisers."""
    kl: KLConfig = KLConfig()
    """Section `kl` with the present coefficient, see `with_coefficients`."""
    entropy: EntropyConfig = EntropyConfig()
    """Section `entropy` with the present coefficient, see `with_coefficients`."""
    correction: CorrectionConfig = NoCorrectionConfig()
    """Section `correction`."""
    off_policy_mask: OffPolicyMaskConfig = OffPolicyMaskConfig()
    """Section `off_policy_mask`."""
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
        """Return the objective with other weights of KL and entropy, as controllers set them.

        Args:
            kl: Coefficient of the KL term.
            entropy: Coefficient of the entropy bonus.
        """
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
        """Return metrics over scored tokens, whatever their weights.

        Beside those of the surrogate and of the sampler:

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
        case DPPOConfig():
            return DPPO(config.divergence, config.low, config.high, config.cap)
        case ClipCovConfig():
            return ClipCov(config.low, config.high)
        case KLCovConfig():
            return KLCov(config.coefficient)
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


Numbers = NDArray[np.float64]
"""[N], one number per trained token of an update"""
Chosen = NDArray[np.bool_]


def covariances(logprobs: Numbers, advantages: Numbers) -> Numbers:
    """Return each token's covariance, [N]; the means are exact, whatever the order of the tokens."""
    return _centred(logprobs) * _centred(advantages)


def _centred(values: Numbers) -> Numbers:
    return values - math.fsum(values) / max(values.size, 1)


def some_between(values: Numbers, priorities: Numbers, share: float, low: float, high: float) -> Chosen:
    """Return [N]: of the tokens with a value strictly between two bounds, those of lowest priority.

    Args:
        values: Covariances.
        priorities: Drawn at random, all different.
        share: Of all N tokens, those that are chosen: rounded down, and at least one if any lies between.
        low: Lower bound.
        high: Upper bound.
    """
    between: Chosen = (values > low) & (values < high)
    count = min(max(int(share * values.size), 1), int(between.sum()))
    if not count:
        return between
    last = np.partition(priorities[between], count - 1)[count - 1]
    selected: Chosen = between & (priorities <= last)
    return selected


def highest(values: Numbers, share: float) -> Chosen:
    """Return [N]: the tokens of the highest values, a share of all rounded down, at least one; ties stay together."""
    if not values.size:
        return np.zeros(0, dtype=np.bool_)
    index = values.size - max(int(share * values.size), 1)
    selected: Chosen = values >= np.partition(values, index)[index]
    return selected
