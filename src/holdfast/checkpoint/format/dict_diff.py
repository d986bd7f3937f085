"""Where two trees of plain values differ first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ABSENT = "absent"


def first_difference(one: Any, two: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Return the path of the first value that differs, such as groups.0.lr, and both values; None if all are equal.

    Keys come in order of their names. Values are equal if they are written alike, as 1 and True are not, and NaN is.
    """
    match one, two:
        case Mapping(), Mapping():
            pairs = [(str(key), one.get(key, ABSENT), two.get(key, ABSENT)) for key in sorted({*one, *two})]
        case list(), list() if len(one) == len(two):
            pairs = [(str(number), left, right) for number, (left, right) in enumerate(zip(one, two, strict=True))]
        case _:
            return None if repr(one) == repr(two) else (path, one, two)
    steps = (first_difference(left, right, f"{path}.{key}" if path else key) for key, left, right in pairs)
    return next((difference for difference in steps if difference is not None), None)
