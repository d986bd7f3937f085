"""A tool's schema is what `get_json_schema` of transformers says of it, so prompts are those of other systems."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Dict, Literal, Optional, Union  # noqa: UP035

import pytest
from transformers.utils import get_json_schema

from holdfast.environments.tools import tool_of


class Suit(enum.Enum):
    HEARTS = "hearts"
    SPADES = "spades"


def plain(number: int, share: float, name: str, *, loud: bool = False) -> str:
    """Say a name.

    It may be said
    more than once.

    Args:
        number: How often.
        share: Of what
            there is:
            all of it.
        name: Whose
        loud: Whether loudly (choices: [true, false])

    Returns:
        What was said,
        in two lines.
    """
    return name * number


def nested(
    rows: list[list[int]],
    table: dict[str, float],
    pair: tuple[int, str],
    either: int | str | None,
    several: Union[list[int], str],  # noqa: UP007 - as files of users have it
    suit: Suit,
    mode: Literal["fast", "slow"],
    level: Literal[1, "high"],
    last: Optional[float] = None,  # noqa: UP045 - likewise
) -> dict[str, list[int]]:
    """Take everything.

    Args:
        rows: Rows.
        table: A table.
        pair: A pair.
        either: One of two.
        several: Many or one.
        suit: A suit.
        mode: A mode.
        level: A level.
        last: The last.

    Returns:
        Nothing of it.

    Raises:
        ValueError: Always.
    """
    raise ValueError


def bare(anything: Any, items: list, mapping: Dict) -> None:  # type: ignore[type-arg]  # noqa: UP006 - likewise
    """Take what has no more to it.

    Args:
        anything: Whatever.
        items: Items.
        mapping: A mapping.
    """


def nothing() -> None:
    """Do nothing."""


def strange_return(a: int) -> complex:
    """Return what JSON has no word for.

    Args:
        a: A number.
    """
    return complex(a)


@pytest.mark.parametrize("function", [plain, nested, bare, nothing, strange_return])
def test_a_schema_is_that_of_transformers(function: Callable[..., Any]) -> None:
    assert tool_of(function, "environment").schema == get_json_schema(function)


def test_a_method_leaves_its_instance_out() -> None:
    class World:
        def move(self, steps: int) -> str:
            """Move.

            Args:
                steps: How far.
            """
            return "moved" * steps

    assert tool_of(World.move, "environment", is_method=True).schema == get_json_schema(World().move)
