"""Losses of a policy once more, in NumPy: one token, one sequence at a time, with gradients worked out by hand.

A surrogate gives, per token, its term and the derivative of the weighted sum of all terms by that token's
log-probability. Nothing here is shared with the code it checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Found = tuple[Array, Array]
"""Terms [N], and the gradient [N] of sum(weights * terms)."""


@dataclass(frozen=True)
class Case:
    """Scored tokens of a few sequences."""

    logprobs: Array
    proximal: Array | None
    """None: the first update of a rollout"""
    advantages: Array
    sequence: NDArray[np.int64]
    weights: Array
    sampler: Array
    reference: Array
    entropy: Array
    entropy_mask: NDArray[np.bool_]

    @property
    def log_ratio(self) -> Array:
        return np.zeros_like(self.logprobs) if self.proximal is None else self.logprobs - self.proximal

    def members(self) -> list[NDArray[np.int64]]:
        return [np.flatnonzero(self.sequence == index) for index in np.unique(self.sequence)]

    def per_sequence(self, of: Callable[[Array], float], values: Array) -> Array:
        result = np.empty_like(values)
        for places in self.members():
            result[places] = of(values[places])
        return result


def clip_term(ratio: float, advantage: float, low: float, high: float, ceiling: float | None) -> tuple[float, bool]:
    """Return one term, and whether its ratio has a gradient."""
    if advantage > 0:
        return -advantage * min(ratio, 1 + high), ratio < 1 + high
    term, moves = -advantage * max(ratio, 1 - low), ratio > 1 - low
    if ceiling is not None and ratio > ceiling:
        return -advantage * ceiling, False
    return term, moves


def clip(case: Case, low: float, high: float, ceiling: float | None = None) -> Found:
    terms, gradient = np.empty_like(case.logprobs), np.empty_like(case.logprobs)
    for t, (log_ratio, advantage) in enumerate(zip(case.log_ratio, case.advantages, strict=True)):
        ratio = math.exp(log_ratio)
        terms[t], moves = clip_term(ratio, advantage, low, high, ceiling)
        gradient[t] = -advantage * ratio * moves * case.weights[t]
    return terms, gradient


def gspo(case: Case, low: float, high: float) -> Found:
    terms, gradient = np.empty_like(case.logprobs), np.zeros_like(case.logprobs)
    for places in case.members():
        ratio = math.exp(sum(case.log_ratio[places]) / len(places))
        by_ratio = 0.0
        for t in places:
            terms[t], moves = clip_term(ratio, case.advantages[t], low, high, None)
            by_ratio += case.weights[t] * -case.advantages[t] * moves
        gradient[places] = by_ratio * ratio / len(places)
    return terms, gradient


def gspo_token(case: Case, low: float, high: float) -> Found:
    terms, gradient = np.empty_like(case.logprobs), np.empty_like(case.logprobs)
    for places in case.members():
        ratio = math.exp(sum(case.log_ratio[places]) / len(places))
        for t in places:
            terms[t], moves = clip_term(ratio, case.advantages[t], low, high, None)
            gradient[t] = -case.advantages[t] * ratio * moves * case.weights[t]
    return terms, gradient


def cispo(case: Case, low: float, high: float) -> Found:
    weight = np.array([min(max(math.exp(value), 1 - low), 1 + high) for value in case.log_ratio])
    by_logprob = -weight * case.advantages
    return by_logprob * case.logprobs, by_logprob * case.weights


def dppo(case: Case, divergence: str, low: float, high: float, cap: float) -> Found:
    terms, gradient = np.zeros_like(case.logprobs), np.zeros_like(case.logprobs)
    for t, (logprob, log_ratio, advantage) in enumerate(
        zip(case.logprobs, case.log_ratio, case.advantages, strict=True)
    ):
        p, q = math.exp(logprob), math.exp(logprob - log_ratio)
        away = abs(p - q) if divergence == "tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        if away > (high if advantage > 0 else low) and (p > q) == (advantage > 0):
            continue
        by_logprob = -min(p / q, cap) * advantage
        terms[t], gradient[t] = by_logprob * logprob, by_logprob * case.weights[t]
    return terms, gradient


def sapo(case: Case, tau_positive: float, tau_negative: float) -> Found:
    terms, gradient = np.empty_like(case.logprobs), np.empty_like(case.logprobs)
    for t, (log_ratio, advantage) in enumerate(zip(case.log_ratio, case.advantages, strict=True)):
        tau, ratio = tau_positive if advantage > 0 else tau_negative, math.exp(log_ratio)
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        terms[t] = -4 / tau * gate * advantage
        gradient[t] = -4 * gate * (1 - gate) * ratio * advantage * case.weights[t]
    return terms, gradient


def reinforce(case: Case) -> Found:
    return -case.advantages * case.logprobs, -case.advantages * case.weights


def luspo(case: Case, low: float, high: float) -> Found:
    lengths = case.per_sequence(len, case.logprobs)
    terms, gradient = gspo(case, low, high)
    return terms * lengths, gradient * lengths


def gmpo(case: Case, low: float, high: float) -> Found:
    terms, gradient = np.empty_like(case.logprobs), np.zeros_like(case.logprobs)
    for places in case.members():
        total, moves = 0.0, {}
        sign = 1.0 if case.advantages[places[0]] >= 0 else -1.0
        for t in places:
            value = case.log_ratio[t]
            bounded = min(value, high) if sign > 0 else max(value, -low)
            total, moves[t] = total + bounded, bounded == value
        ratio = math.exp(total / len(places))
        by_ratio = sum(case.weights[t] * -case.advantages[t] for t in places)
        for t in places:
            terms[t] = -case.advantages[t] * ratio
            gradient[t] = by_ratio * ratio * moves[t] / len(places)
    return terms, gradient


def vespo(case: Case, k: tuple[float, float], rate: tuple[float, float]) -> Found:
    by_logprob = np.empty_like(case.logprobs)
    for places in case.members():
        ratio = math.exp(sum(case.log_ratio[places]))
        for t in places:
            side = 0 if case.advantages[t] >= 0 else 1
            phi = ratio ** k[side] * math.exp(rate[side] * (1 - ratio))
            by_logprob[t] = -phi * case.advantages[t]
    return by_logprob * case.logprobs, by_logprob * case.weights


def kl(estimator: str, logprobs: Array, reference: Array) -> Found:
    """Return estimates and their derivatives by log-probability; k2 is a line beyond +-20, k3 above 10."""
    values, slopes = np.empty_like(logprobs), np.empty_like(logprobs)
    corner = bisect(lambda d: math.exp(d) - d - 1 - 10, 0.0, 10.0)
    for t, d in enumerate(reference - logprobs):
        k2, by_k2 = (d * d / 2, -d) if abs(d) <= 20 else (200 + 20 * (abs(d) - 20), -math.copysign(20, d))
        k3, by_k3 = (math.exp(d) - d - 1, 1 - math.exp(d)) if d <= corner else (10.0, 1 - math.exp(corner))
        k3 -= by_k3 * max(d - corner, 0.0)
        values[t], slopes[t] = {
            "k1": (-d, 1.0),
            "k2": (k2, by_k2),
            "k3": (k3, by_k3),
            "abs": (abs(d), -math.copysign(1, d)),
            "straight_through": (k3, by_k2),
        }[estimator]
    return values, slopes


def bisect(of: Callable[[float], float], below: float, above: float) -> float:
    """Return where a rising function is 0."""
    for _ in range(100):
        middle = (below + above) / 2
        below, above = (middle, above) if of(middle) < 0 else (below, middle)
    return (below + above) / 2


def weighted_kl(estimator: str, case: Case) -> Found:
    """Return ratio * estimate and its derivative; the ratio of k2 and straight_through is a constant."""
    values, slopes = kl(estimator, case.logprobs, case.reference)
    ratio = np.exp(case.log_ratio)
    live = estimator not in {"k2", "straight_through"}
    return ratio * values, ratio * slopes + (ratio * values if live else 0.0)


def correction(case: Case, kind: str, level: str, low: float, high: float, weighted: bool = True) -> Array:
    """Return what multiplies each surrogate: min(r, high), or r within [low, high]."""
    base = case.logprobs if case.proximal is None else case.proximal
    log_ratio = np.where(np.isfinite(case.sampler), base - case.sampler, 0.0)
    if level == "sequence":
        log_ratio = case.per_sequence(lambda values: sum(values) / len(values), log_ratio)
    ratio = np.exp(np.clip(log_ratio, -20, 20))
    if kind == "truncate":
        return np.minimum(ratio, high)
    return np.where((ratio >= low) & (ratio <= high), ratio if weighted else 1.0, 0.0)


def kept_by_policy(case: Case, max_kl: float) -> NDArray[np.bool_]:
    kept = np.ones(case.logprobs.size, dtype=np.bool_)
    for places in case.members():
        away = np.mean(case.sampler[places] - case.logprobs[places])
        kept[places] = not (np.sum(case.advantages[places]) < 0 and away > max_kl)
    return kept


def to_go(case: Case, values: Array) -> Array:
    result = np.empty_like(values)
    for places in case.members():
        for index, t in enumerate(places):
            result[t] = sum(values[places[index:]])
    return result
