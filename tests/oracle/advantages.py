"""Advantages once more, one completion at a time, with Python's own numbers."""

from __future__ import annotations

import itertools
import math
import statistics

Row = list[float | None]
"""One group; None where a completion was not scored."""


def known(values: list[Row]) -> list[float]:
    return [value for row in values for value in row if value is not None]


def grpo(rows: list[Row], epsilon: float) -> list[list[float]]:
    result = []
    for row in rows:
        mean, spread = statistics.mean(known([row])), statistics.stdev(known([row]))
        result.append([0.0 if r is None else (r - mean) / (spread + epsilon) for r in row])
    return result


def dr_grpo(rows: list[Row]) -> list[list[float]]:
    return [[0.0 if r is None else r - statistics.mean(known([row])) for r in row] for row in rows]


def rloo(rows: list[Row]) -> list[list[float]]:
    result = []
    for row in rows:
        others = [[o for j, o in enumerate(row) if j != i and o is not None] for i in range(len(row))]
        result.append([0.0 if r is None else r - statistics.mean(o) for r, o in zip(row, others, strict=True)])
    return result


def opo(rows: list[Row], lengths: list[list[int]]) -> list[list[float]]:
    result = []
    for row, own in zip(rows, lengths, strict=True):
        scored = [(r, length) for r, length in zip(row, own, strict=True) if r is not None]
        baseline = sum(r * length for r, length in scored) / sum(length for _, length in scored)
        result.append([0.0 if r is None else r - baseline for r in row])
    return result


def maxrl(row: Row) -> list[float]:
    """Return r / (K / N) - 1, which is N / K - 1 for a right answer and -1 for a wrong one; 0 without a right one."""
    right, scored = sum(known([row])), len(known([row]))
    return [0.0 if r is None or not right else r * scored / right - 1 for r in row]


def gpg(rows: list[Row]) -> list[list[float]]:
    """Return centred rewards times groups of two and more over those of them with two different rewards."""
    groups = [row for row in rows if len(known([row])) > 1]
    uneven = [row for row in groups if len(set(known([row]))) > 1]
    result = []
    for row in rows:
        factor = len(groups) / len(uneven) if row in uneven else 0.0
        result.append([0.0 if r is None else (r - statistics.mean(known([row]))) * factor for r in row])
    return result


def reinforce_pp(rows: list[Row], epsilon: float) -> list[list[float]]:
    mean, spread = statistics.mean(known(rows)), statistics.stdev(known(rows))
    return [[0.0 if r is None else (r - mean) / (spread + epsilon) for r in row] for row in rows]


def over_the_batch(rows: list[Row], spread_of: list[Row], epsilon: float) -> list[list[float]]:
    """Return group-centred rewards over the standard deviation of all of `spread_of`."""
    spread = statistics.stdev(known(spread_of))
    return [[value / (spread + epsilon) for value in row] for row in dr_grpo(rows)]


def pass_at_k(row: Row, k: int, threshold: float) -> list[float]:
    """Return for each completion the mean of (its group's reward - mean) / std over all groups of k that hold it."""
    places = [place for place, value in enumerate(row) if value is not None]
    groups = list(itertools.combinations(places, k))
    rewards = [float(any(row[place] > threshold for place in group)) for group in groups]  # type: ignore[operator]
    mean = statistics.mean(rewards)
    spread = math.sqrt(statistics.mean((reward - mean) ** 2 for reward in rewards))
    result = [0.0] * len(row)
    for place in places:
        of_place = [(r - mean) / spread for r, group in zip(rewards, groups, strict=True) if place in group]
        result[place] = statistics.mean(of_place)
    return result
