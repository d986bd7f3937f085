"""Find the first difference between two trees of plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ABSENT = "absent"


def first_difference(first: Any, second: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Return the path of the first value that differs, such as groups.0.lr, and both values; None if all are equal.

    Keys come in order of their names. Values are equal if they are written alike, as 1 and True are not, and NaN is.
    """
    match first, second:
        case Mapping(), Mapping():
            pairs = [(str(key), first.get(key, ABSENT), second.get(key, ABSENT)) for key in sorted({*first, *second})]
        case list(), list() if len(first) == len(second):
            pairs = [
                (str(number), first_value, second_value)
                for number, (first_value, second_value) in enumerate(zip(first, second, strict=True))
            ]
        case _:
            return None if repr(first) == repr(second) else (path, first, second)
    steps = (
        first_difference(first_value, second_value, f"{path}.{key}" if path else key)
        for key, first_value, second_value in pairs
    )
    return next((difference for difference in steps if difference is not None), None)
