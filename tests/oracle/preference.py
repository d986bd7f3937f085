"""Losses on preferences in NumPy, pair by pair, with derivatives by hand.

Every function takes (r, m) of the chosen and the rejected answer: r = log policy - log reference summed over tokens,
m = mean log-probability under the policy; and returns the loss with its derivatives by the four of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple


class Answer(NamedTuple):
    """One answer."""

    r: float
    m: float
    length: int


Result = tuple[float, float, float, float, float]
"""loss, and its derivatives by chosen r, rejected r, chosen m, rejected m"""
Loss = Callable[[Answer, Answer], Result]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def dpo(beta: float, smoothing: float = 0.0, mean: bool = False) -> Loss:
    def loss(chosen: Answer, rejected: Answer) -> Result:
        a, b = (beta / answer.length if mean else beta for answer in (chosen, rejected))
        h = a * chosen.r - b * rejected.r
        value = -(1 - smoothing) * math.log(sigmoid(h)) - smoothing * math.log(sigmoid(-h))
        slope = -(1 - smoothing) * sigmoid(-h) + smoothing * sigmoid(h)
        return value, slope * a, -slope * b, 0.0, 0.0

    return loss


def robust(beta: float, smoothing: float) -> Loss:
    def loss(chosen: Answer, rejected: Answer) -> Result:
        h = beta * (chosen.r - rejected.r)
        scale = 1 / (1 - 2 * smoothing)
        value = scale * (-(1 - smoothing) * math.log(sigmoid(h)) + smoothing * math.log(sigmoid(-h)))
        slope = scale * (-(1 - smoothing) * sigmoid(-h) - smoothing * sigmoid(h)) * beta
        return value, slope, -slope, 0.0, 0.0

    return loss


def ipo(beta: float, mean: bool = False) -> Loss:
    def loss(chosen: Answer, rejected: Answer) -> Result:
        a, b = (1 / answer.length if mean else 1.0 for answer in (chosen, rejected))
        away = a * chosen.r - b * rejected.r - 1 / (2 * beta)
        return away**2, 2 * away * a, -2 * away * b, 0.0, 0.0

    return loss


def hinge(beta: float) -> Loss:
    def loss(chosen: Answer, rejected: Answer) -> Result:
        short = 1 - beta * (chosen.r - rejected.r)
        slope = -beta if short > 0 else 0.0
        return max(short, 0.0), slope, -slope, 0.0, 0.0

    return loss


def apo_zero(beta: float) -> Loss:
    def loss(chosen: Answer, rejected: Answer) -> Result:
        up, down = sigmoid(beta * chosen.r), sigmoid(beta * rejected.r)
        return 1 - up + down, -beta * up * (1 - up), beta * down * (1 - down), 0.0, 0.0

    return loss


def apo_down(beta: float) -> Loss:
    def loss(chosen: Answer, rejected: Answer) -> Result:
        up, apart = sigmoid(beta * chosen.r), sigmoid(beta * (chosen.r - rejected.r))
        by_apart = -beta * apart * (1 - apart)
        return up + 1 - apart, beta * up * (1 - up) + by_apart, -by_apart, 0.0, 0.0

    return loss


def simpo(beta: float, gamma: float) -> Loss:
    def loss(chosen: Answer, rejected: Answer) -> Result:
        h = beta * (chosen.m - rejected.m) - gamma
        slope = -beta * sigmoid(-h)
        return -math.log(sigmoid(h)), 0.0, 0.0, slope, -slope

    return loss


def orpo(beta: float) -> Loss:
    def odds(m: float) -> float:
        return m - math.log(1 - math.exp(m))

    def loss(chosen: Answer, rejected: Answer) -> Result:
        h = odds(chosen.m) - odds(rejected.m)
        slope = -beta * sigmoid(-h)
        by_chosen, by_rejected = (slope / (1 - math.exp(answer.m)) for answer in (chosen, rejected))
        return -chosen.m - beta * math.log(sigmoid(h)), 0.0, 0.0, -1 + by_chosen, -by_rejected

    return loss


def summed(*parts: tuple[float, Loss], sft: float = 0.0) -> Loss:
    """Return the weighted sum of losses, and the likelihood of the chosen answer."""

    def loss(chosen: Answer, rejected: Answer) -> Result:
        found = [(weight, each(chosen, rejected)) for weight, each in parts] + [(sft, (-chosen.m, 0.0, 0.0, -1.0, 0.0))]
        value, *slopes = (sum(weight * result[place] for weight, result in found) for place in range(5))
        return value, slopes[0], slopes[1], slopes[2], slopes[3]

    return loss


def kto(beta: float, z0: float, desirable: bool, weight: float, r: float) -> tuple[float, float]:
    """Return the loss of one answer, and its derivative by r."""
    side = 1 if desirable else -1
    value = sigmoid(side * beta * (r - z0))
    return weight * (1 - value), -weight * side * beta * value * (1 - value)
