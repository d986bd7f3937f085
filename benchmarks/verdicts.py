"""Ratios against targets, printed, and written as the rows that `gpu.sh` puts into one table."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import FAILED, Round

ROWS = "HOLDFAST_BENCHMARK_ROWS"
"""Names the file that rows are appended to; without it they are only printed."""


def write_row(what: str, measured: str, target: str = "", met: bool | None = None) -> None:
    """Append a row to the table.

    Args:
        what: What was measured, with its unit.
        measured: The number, or why there is none.
        target: Such as ">= 1.3".
        met: Whether it was reached; None where nothing was asked.
    """
    if path := os.environ.get(ROWS):
        verdict = "" if met is None else "met" if met else "**missed**"
        cells = [cell.replace("|", "/").replace("\n", " ") for cell in (what, target, measured, verdict)]
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(" | ".join(cells) + " |\n")


def show(what: str, measured: str, target: str = "", *, met: bool | None = None) -> None:
    """Print a measurement as the verdicts of arms are printed, and append it to the table."""
    word = "    " if met is None else "ok  " if met else "MISS"
    print(f"{word}  {what}: {measured}{f' (target {target})' if target else ''}", flush=True)
    write_row(what, measured, target, met)


def skip(what: str, why: str) -> None:
    """Say that something is not measured on this machine, and why."""
    print(f"skipped: {what}: {why}", flush=True)
    write_row(what, f"skipped: {why}")


def number(value: float, places: int = 3) -> str:
    """Return a number in so many significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{places}g}"


def listed(values: Sequence[float]) -> str:
    """Return numbers as they stand behind a ratio, one for each round."""
    return " ".join(f"{value:.3f}" for value in values)


def _ratio(over: Any, under: Any) -> float:
    if isinstance(over, list):
        return statistics.median(one / other for one, other in zip(over, under, strict=True))
    return float(over / under)


class Verdicts:
    """Ratios of two arms against targets; the worst round decides.

    Where arms tell a list, a value for each update, the ratio of a round is the median over its updates.

    Args:
        rounds: What the arms printed.
        judged: Whether targets count; where shapes are tiny they say nothing.
    """

    def __init__(self, rounds: Sequence[Round], *, judged: bool = True) -> None:
        self._rounds, self._judged = rounds, judged
        self.missed = False

    def at_least(self, target: float | None, title: str, over: str, under: str, key: str) -> None:
        """Print whether over / under reaches a target in every round."""
        if ratios := self._ratios(over, under, key, title):
            met = target is None or min(ratios) >= target
            self._print(met, title, f"worst {min(ratios):.3f}", f">= {target}" if target else "", ratios)

    def at_most(self, target: float | None, title: str, over: str, under: str, key: str) -> None:
        """Print whether over / under stays within a target in every round."""
        if ratios := self._ratios(over, under, key, title):
            met = target is None or max(ratios) <= target
            self._print(met, title, f"worst {max(ratios):.3f}", f"<= {target}" if target else "", ratios)

    def at_most_over_all(self, target: float, title: str, over: str, under: str, key: str) -> None:
        """Print whether over / under stays within a target in the median of all pairs, and how sure that is.

        For what one round does not resolve. The interval holds the median with 95% confidence, by order statistics.
        """
        middle, words = self._over_all(over, under, key)
        self._print(middle <= target, title, words, f"<= {target}", self._ratios(over, under, key, title))

    def at_least_over_all(self, target: float, title: str, over: str, under: str, key: str) -> None:
        """Print whether over / under reaches a target in the median of all pairs."""
        middle, words = self._over_all(over, under, key)
        self._print(middle >= target, title, words, f">= {target}", self._ratios(over, under, key, title))

    def tell(self, title: str, arm: str, key: str) -> None:
        """Print a number of an arm, the median of its rounds; nothing is asked of it."""
        if values := self._values(arm, key, title):
            show(title, number(statistics.median(values)))

    def number_at_most(self, target: float, title: str, arm: str, key: str) -> None:
        """Print whether a number of an arm stays within a target in every round."""
        if values := self._values(arm, key, title):
            met = max(values) <= target
            self._print(met, title, f"worst {number(max(values))}", f"<= {target}", values)

    def _values(self, arm: str, key: str, title: str) -> list[float]:
        """Return an arm's number of each round; nothing where it failed, which is a miss and is said."""
        for turn in self._rounds:
            if FAILED in turn[arm]:
                show(title, f"not measured: {arm} failed: {turn[arm][FAILED]}", met=False)
                self.missed = True
                return []
        return [turn[arm][key] for turn in self._rounds]

    def _over_all(self, over: str, under: str, key: str) -> tuple[float, str]:
        turns = [(turn[over][key], turn[under][key]) for turn in self._rounds]
        pairs = sorted(one / other for turn in turns for one, other in zip(*turn, strict=True))
        middle, rank = statistics.median(pairs), max(1, math.floor(len(pairs) / 2 - 0.98 * math.sqrt(len(pairs))))
        low, high = pairs[rank - 1], pairs[-rank]
        return middle, f"median of {len(pairs)} pairs {middle:.3f}, 95% {low:.3f} to {high:.3f}"

    def _ratios(self, over: str, under: str, key: str, title: str) -> list[float]:
        """Return the ratio of each round; nothing where an arm failed."""
        values = [self._values(arm, key, title) for arm in (over, under)]
        return [_ratio(*pair) for pair in zip(*values, strict=True)] if all(values) else []

    def _print(self, ok: bool, title: str, words: str, target: str, ratios: Sequence[float]) -> None:
        judged = bool(target) and self._judged
        self.missed = self.missed or (judged and not ok)
        rounds, word = listed(ratios), "    " if not judged else "ok  " if ok else "MISS"
        print(f"{word}  {title}: {words} ({f'target {target}; ' if target else ''}rounds {rounds})", flush=True)
        write_row(title, words if len(ratios) == 1 else f"{words} ({rounds})", target, ok if judged else None)
