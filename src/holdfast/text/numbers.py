"""Convert numbers of a row to text where a text is expected: the answer 42 becomes the text "42"."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

_LARGEST_WHOLE = 2**53
"""Above it not every whole number is a float, so digits of a float would say more than it knows."""


def number_as_text(value: Any) -> Any:
    """Return a number as JSON's canonical form writes it (RFC 8785), 42.0 as 42; anything else unchanged.

    JSON and parquet do not tell 42.0 from 42, and tables turn whole numbers into floats where one of them is missing.
    Truth values, infinity and NaN are unchanged.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    number: Any = value
    if not math.isfinite(number):
        return value
    is_whole = abs(number) < _LARGEST_WHOLE and number == int(number)
    return str(int(number)) if is_whole else str(value)
