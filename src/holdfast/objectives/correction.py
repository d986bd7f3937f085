"""Corrections for tokens that another distribution sampled than the trainer computes.

An engine's log-probabilities differ from the trainer's by kernels, precision and age. A correction multiplies the
surrogate of a token by a coefficient without a gradient; the denominator of the loss does not change.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.config.sections.policy import (
    CorrectionConfig,
    MaskConfig,
    NoCorrectionConfig,
    TruncateConfig,
)
from holdfast.objectives.base import Tokens, ratio
from holdfast.objectives.ratios import bounded_exp, sequence_mean, sequence_sum


class Mismatch(NamedTuple):
    """Trainer against sampler, without gradients."""

    log_ratio: Tensor
    """[N] log proximal policy - log sampler, in nats; 0 where the sampler gave no finite number"""
    is_finite: Tensor
    """[N] bool, whether the sampler gave a finite number"""


class Correction(NamedTuple):
    """What multiplies the surrogate of each token."""

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
