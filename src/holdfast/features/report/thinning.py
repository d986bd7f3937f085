"""Fewer points of a long curve, by a rule that a reader can be told.

Of more than `MOST_POINTS` points the curve is cut into `BUCKETS` parts with equally many points, and of each the
first, the lowest, the highest and the last are drawn, so that no extreme is lost. Points without a finite value are
drawn as gaps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BUCKETS = 250
MOST_POINTS = 4 * BUCKETS
RULE = (
    f"Of curves with more than {MOST_POINTS:,} points, each of {BUCKETS} equal parts shows its first, lowest, highest "
    "and last one: no extreme is left out."
)


def drawn_places(values: Sequence[float]) -> list[int] | range:
    """Return the places of the points that are drawn, in order."""
    size = len(values)
    if size <= MOST_POINTS:
        return range(size)
    places: list[int] = []
    for bucket in range(BUCKETS):
        start, end = bucket * size // BUCKETS, (bucket + 1) * size // BUCKETS
        places += sorted(_extremes(values, start, end))
    return places


def _extremes(values: Sequence[float], start: int, end: int) -> set[int]:
    """Return the places of the first, the lowest, the highest, the last and one missing value of a part."""
    part = values[start:end]
    chosen = {start, end - 1}
    total = sum(part)
    if math.isfinite(total):
        chosen |= {start + part.index(min(part)), start + part.index(max(part))}
        return chosen
    finite = [place for place, value in enumerate(part) if math.isfinite(value)]
    if finite:
        chosen |= {start + min(finite, key=part.__getitem__), start + max(finite, key=part.__getitem__)}
    gap = next((place for place, value in enumerate(part) if not math.isfinite(value)), None)
    return chosen if gap is None else chosen | {start + gap}


def bucket_means(steps: Sequence[int], values: Sequence[float], buckets: int) -> tuple[list[int], list[float]]:
    """Return the last step and the mean value of each of so many equal parts; of fewer points, the points."""
    size = len(values)
    parts = min(buckets, size)
    ends = [size * number // parts for number in range(parts + 1)] if parts else []
    spans = list(zip(ends, ends[1:], strict=False))
    return [steps[end - 1] for _, end in spans], [sum(values[start:end]) / (end - start) for start, end in spans]
