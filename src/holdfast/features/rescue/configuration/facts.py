"""The input and the result of a rule, and the numbers in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class NotConverted(Exception):  # noqa: N818 - it says what happened, and is never shown
    """A rule cannot convert a value, and a person has to decide. The message, if there is one, gives the reason."""


@dataclass(frozen=True)
class ForeignKey:
    """One key of another system and its value: the argument of every rule."""

    value: Any
    target: str
    """The first of the keys here that its entry names."""
    values: Mapping[str, Any]
    """All values of the file, completed by that system's defaults."""
    ranks: int
    """Ranks of the run; a factor of batches where a system counts rows of one device."""
    verb: str
    is_default: bool = False
    """Whether the value is that system's default, which the file does not write."""

    def get(self, *keys: str) -> Any:
        """Return the value of the first of these keys that has one."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), None)


@dataclass(frozen=True)
class Provisional:
    """Keys of Holdfast with values that are written, although a person has to decide."""

    settings: dict[str, Any]
    remark: str


Converted = dict[str, Any] | tuple[dict[str, Any], str] | Provisional
Rule = Callable[[ForeignKey], Converted]
"""A conversion to keys of Holdfast with their values, and to a remark, such as the arithmetic of a batch."""


def number(value: Any, default: float | None = None) -> float:
    """Return a number, also one that is written as text.

    Raises:
        NotConverted: It is none, and there is no default.
    """
    if value is None and default is not None:
        return default
    try:
        result = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not math.isfinite(result):
        raise NotConverted(f"{value!r} is no number")
    return result


def integer(value: Any, default: int | None = None) -> int:
    """Return a whole number.

    Raises:
        NotConverted: It is none.
    """
    result = number(value, default)
    if result != int(result):
        raise NotConverted(f"{value} is no whole number")
    return int(result)


def count(value: Any, default: int | None = None) -> int:
    """Return a whole number of at least 1.

    Raises:
        NotConverted: It is none.
    """
    result = integer(value, default)
    if result < 1:
        raise NotConverted(f"{value} is below 1")
    return result


def text(value: Any) -> str:
    """Return a text that is not empty.

    Raises:
        NotConverted: It is none.
    """
    if not isinstance(value, str) or not value:
        raise NotConverted(f"{value!r} is no text")
    return value


def names_of(value: Any) -> list[str]:
    """Return a list of names, of one name, or of names with commas."""
    return [str(name).strip() for name in (value if isinstance(value, list) else str(value).split(","))]


def weights_of(value: Any, items: int) -> list[float]:
    """Return one weight for each of several items; 1 where none are written.

    Raises:
        NotConverted: There are more or fewer.
    """
    if value is None:
        return [1.0] * items
    if not isinstance(value, list) or len(value) != items:
        raise NotConverted(f"{value} is no list of {items} weights")
    return [number(weight) for weight in value]
