"""Thins the points of a long curve by a rule that keeps every extreme.

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


def drawn_indices(values: Sequence[float]) -> list[int] | range:
    """Return the indices of the points that are drawn, in order."""
    size = len(values)
    if size <= MOST_POINTS:
        return range(size)
    indices: list[int] = []
    for bucket in range(BUCKETS):
        start, end = bucket * size // BUCKETS, (bucket + 1) * size // BUCKETS
        indices += sorted(_extremes(values, start, end))
    return indices


def _extremes(values: Sequence[float], start: int, end: int) -> set[int]:
    """Return the indices of the first, lowest, highest and last value of a bucket, and of one that is not finite."""
    bucket = values[start:end]
    indices = {start, end - 1}
    total = sum(bucket)
    if math.isfinite(total):
        indices |= {start + bucket.index(min(bucket)), start + bucket.index(max(bucket))}
        return indices
    finite = [index for index, value in enumerate(bucket) if math.isfinite(value)]
    if finite:
        indices |= {start + min(finite, key=bucket.__getitem__), start + max(finite, key=bucket.__getitem__)}
    gap = next((index for index, value in enumerate(bucket) if not math.isfinite(value)), None)
    return indices if gap is None else indices | {start + gap}


def bucket_means(steps: Sequence[int], values: Sequence[float], buckets: int) -> tuple[list[int], list[float]]:
    """Return the last step and the mean value of each of so many equal parts; of fewer points, the points."""
    size = len(values)
    count = min(buckets, size)
    ends = [size * number // count for number in range(count + 1)] if count else []
    spans = list(zip(ends, ends[1:], strict=False))
    return [steps[end - 1] for _, end in spans], [sum(values[start:end]) / (end - start) for start, end in spans]
