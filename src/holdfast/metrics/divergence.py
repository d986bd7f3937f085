"""Alarms for a model that is worse than at its start, or no better than chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

_LASTING_STEPS = 5
"""Steps in a row that a loss is high before it counts."""
_FEWEST_STEPS = 10
"""Before a model is compared with chance."""
_SAME = 1e-6
"""Rewards within this range are one value."""
_ABOVE_START = 3.0
"""A loss this many times that of the first steps."""
_FIRST_STEPS = 5
"""Steps whose median is the loss at the start."""
_SMALL_LOSS, _SMALL_LOSS_OF_ONE = 0.1, 1.0
"""A loss this close to that of the first steps, or of the first alone, is no alarm, whatever their ratio."""
COMPARED_STEPS = 10
"""Steps at the start and now whose rewards are compared; without a trend all of one are below all of the other once in
185,000 times."""
_GUESSING = 1 - 1e-4
"""Share of ln V, that of drawing each token at random, from which on a loss or an entropy is that of guessing."""
_ALMOST_GUESSING, LONGEST_PAST = 0.95, 30
"""Share of ln V below which a loss or an entropy must have come in so many steps."""
Past = Sequence[Mapping[str, float]]
"""Metrics of the last steps, the present one last."""


def guessing(past: Past, chance: float) -> str | None:
    """Say that a model is no better than one that draws tokens at random, whose loss and entropy are `chance`."""
    name = next((name for name in ("nll", "entropy", "entropy_estimate") if name in past[-1]), "")
    rates = [line.get("learning_rate", 0.0) for line in past[-2:]]
    values, stuck = last_values(past, name, _LASTING_STEPS), last_values(past, name, LONGEST_PAST)
    limit = _GUESSING * chance
    if stuck and min(stuck) >= _ALMOST_GUESSING * chance:
        values, limit = stuck, _ALMOST_GUESSING * chance
    if not values or not min(values) >= limit or len(past) < _FEWEST_STEPS:
        return None
    was_better = any(line.get(name, chance) < limit for line in past)
    if rates[-1] > rates[0] and not was_better:
        return None  # a random start, while the rate still rises
    quantity = "loss" if name == "nll" else "entropy of the policy"
    return (
        f"the {quantity} is {values[-1]:.4g} nats per token, and for {len(values)} steps it was hardly below "
        f"{chance:.4g}, that of drawing every token at random. "
        "Lower optim.lr if it was better before; else raise it, or look at the rows."
    )


def diverged(past: Past, first: Past) -> str | None:
    """Say that a loss stays far above that of the first steps; that of a policy lies around 0 and says nothing."""
    name = "nll" if "nll" in past[-1] else "loss" if "rewards/margins" in past[-1] else ""
    values = last_values(past, name, _LASTING_STEPS)
    begun = [line[name] for line in first[:_FIRST_STEPS] if name in line]
    if not values or len(begun) < _FIRST_STEPS:
        return None
    # The second step may have broken the model already; and a first step alone may be low by chance.
    starts = (median(begun), _SMALL_LOSS), (begun[0], _SMALL_LOSS_OF_ONE)
    start = min(starts, key=lambda pair: max(_ABOVE_START * pair[0], sum(pair)))[0]
    if not any(min(values) > max(_ABOVE_START * loss, loss + small) for loss, small in starts):
        return None
    return (
        f"the loss is {values[-1]:.4g}, and for {len(values)} steps it was more than {_ABOVE_START:g} times the "
        f"{start:.4g} of the first steps. Lower optim.lr or optim.clip_norm, and begin from an earlier checkpoint."
    )


def reward_fell(past: Past, first: Past) -> str | None:
    """Say that the rewards are all below those of the first steps."""
    values, begun = last_values(past, "reward", COMPARED_STEPS), [line["reward"] for line in first if "reward" in line]
    if not values or len(begun) < COMPARED_STEPS or max(values) >= min(begun) - _SAME:
        return None
    return (
        f"the reward was at most {max(values):.4g} in the last {len(values)} steps, and at least {min(begun):.4g} in "
        "the first ones: the policy unlearns. Lower optim.lr, set kl.coefficient, or read samples.jsonl."
    )


def last_values(past: Past, name: str, steps: int) -> list[float]:
    """Return the last values of a metric; none if it is missing in one of the steps."""
    values = [line[name] for line in past[-steps:] if name in line]
    return values if len(values) == steps else []
