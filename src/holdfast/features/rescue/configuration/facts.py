"""The input and the result of a conversion."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class NotConverted(Exception):  # noqa: N818 - it says what happened, and is never shown
    """A rule cannot convert a value, and a person has to decide. The message, if there is one, gives the reason."""


@dataclass(frozen=True)
class Facts:
    """The values in a file of another system, completed by that system's defaults."""

    values: Mapping[str, Any]
    ranks: int
    """Ranks of the run; a factor of batches where a system counts rows of one device."""
    verb: str

    def get(self, *keys: str) -> Any:
        """Return the value of the first of these keys that has one."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), None)


@dataclass(frozen=True)
class ForeignKey:
    """One key of another system and its value: the argument of every rule."""

    value: Any
    facts: Facts
    """The other values of the file."""
    targets: tuple[str, ...]
    """The keys here that its entry names."""

    @property
    def target(self) -> str:
        """The first of the keys of Holdfast that this key becomes."""
        return self.targets[0]


@dataclass(frozen=True)
class KeyOutcome:
    """The result of a rule: keys of Holdfast with their values, and a remark."""

    settings: Mapping[str, Any]
    remark: str = ""


Rule = Callable[[ForeignKey], KeyOutcome]
"""A conversion."""


def number(value: Any, default: float | None = None) -> float:
    """Return a number, also one that is written as text.

    Raises:
        NotConverted: It is none, and there is no default.
    """
    if value is None and default is not None:
        return default
    if isinstance(value, bool):
        raise NotConverted(f"{str(value).lower()} is no number")
    try:
        result = float(value)
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
