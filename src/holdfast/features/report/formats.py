"""Writes numbers, lengths of time and times of the clock, for the page, the terminal and a comparison alike."""

from __future__ import annotations

import math
from datetime import datetime

NOT_THERE = "—"
SIGNIFICANT, OF_SAMPLES = 7, 5
"""Digits of a number in the page's data; of rewards, advantages and log-probabilities."""


def digits(value: float | None) -> str:
    """Return a number for a reader, with at most four digits that count."""
    if value is None or not math.isfinite(value):
        return NOT_THERE
    if (value == int(value) and abs(value) < 1e15) or 1000 <= abs(value) < 1e5:
        return f"{value:,.0f}"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1000 else f"{value:.3g}"


def rounded(value: float | None, digits: int = SIGNIFICANT) -> float | int | None:
    """Return a number with so many digits that count; None for what is none."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def counted(number: int, noun: str) -> str:
    """Return a number of things: 1 line, 2 lines."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def seconds_words(seconds: float) -> str:
    """Return a length of time: 41 s, 3 min 20 s, 2 h 5 min."""
    if not math.isfinite(seconds):
        return NOT_THERE
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
    minutes, remaining_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remaining_seconds} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def moment(seconds: float | None) -> str:
    """Return a time of the clock here; empty for none."""
    try:
        return "" if seconds is None else datetime.fromtimestamp(seconds).astimezone().strftime("%d %b %Y %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return ""
