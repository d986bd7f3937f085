"""A tool's schema is what `get_json_schema` of transformers says of it, so prompts are those of other systems."""

from __future__ import annotations

import datetime
import enum
import math
from collections.abc import Callable
from typing import Any, Dict, Literal, Optional, Union  # noqa: UP035

import pytest
from transformers.utils import get_json_schema

from holdfast.environments.base import ToolCall, Turn
from holdfast.environments.forms import Form
from holdfast.environments.instances import Instance, _tools_of_class
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


class World:
    def begin(self, row: dict[str, Any]) -> None: ...

    def level(self, at: Literal[1, 2.5, "high"], share: float = 0.0, pair: tuple[int, str] = (1, "")) -> list[Any]:
        return [at, share, list(pair)]

    @staticmethod
    def twice(number: int) -> int:
        return 2 * number

    def play(self, suit: Suit) -> str:
        return str(suit)

    def paint(self, colour: str, coats: int | None = None) -> list[Any]:
        """Paint.

        Args:
            colour: Of the paint (choices: ["red", "blue"])
            coats: How many.
        """
        return [colour, coats]

    def scale(self, size: str) -> str:
        """Scale.

        Args:
            size: Which (choices: [1, 2])
        """
        return str(size)

    def day(self) -> dict[str, Any]:
        return {"day": datetime.date(2026, 1, 2)}

    def opaque(self) -> list[Any]:
        return [object()]

    def circular(self) -> list[Any]:
        items: list[Any] = []
        items.append(items)
        return items


TOLD = [
    ("level", {"at": 2.5, "share": 1}, '[2.5, 1.0, [1, ""]]'),
    ("level", {"at": "high", "pair": [7, "b"]}, '["high", 0.0, [7, "b"]]'),
    ("level", {"at": 3}, "error: at of level should be one of 1, 2.5, 'high', not 3"),
    ("level", {"at": 1, "pair": ["b", 7]}, "error: pair of level should be array, not ['b', 7]"),
    ("level", {"at": 1, "share": 10**400}, "error: share of level should be number, not 1" + 400 * "0"),
    ("level", {"at": 1, "share": "1"}, "error: share of level should be number, not '1'"),
    ("level", {"at": 1, "share": math.nan}, "error: share of level should be number, not nan"),
    ("twice", {"number": True}, "error: number of twice should be integer, not True"),
    ("twice", {"number": 2.0}, "error: number of twice should be integer, not 2.0"),
    ("twice", {"number": 2**70}, str(2**71)),
    ("play", {"suit": "spades"}, "Suit.SPADES"),
    ("play", {"suit": "SPADES"}, "error: suit of play should be one of 'hearts', 'spades', not 'SPADES'"),
    ("paint", {"colour": "red"}, '["red", null]'),
    ("paint", {"colour": "green"}, "error: colour of paint should be one of 'red', 'blue', not 'green'"),
    ("paint", {"colour": "red", "coats": None}, '["red", null]'),
    ("scale", {"size": 2}, "2"),
    ("scale", {"size": "2"}, "error: size of scale should be one of 1, 2, not '2'"),
    ("paint", {"colour": None}, "error: colour of paint should be one of 'red', 'blue', not None"),
    ("paint", {"colour": "\ud800"}, "error: colour of paint should be one of 'red', 'blue', not '\\ud800'"),
    ("twice", {"number": 4}, "8"),
    ("day", {}, '{"day": "2026-01-02"}'),
    ("opaque", {}, "error: TypeError: returned a object, which is neither text nor JSON"),
    ("circular", {}, "error: ValueError: Circular reference detected"),
]


def test_calls_and_what_comes_of_them_are_answered_whatever_they_are() -> None:
    tools = {tool.name: tool for tool in _tools_of_class(World, "World")}
    instance = Instance(Form(World()), tuple(tools.values()), {}, 5)

    result = instance.take(Turn(0, "", tuple(ToolCall(name, arguments) for name, arguments, _ in TOLD)))

    assert [message["content"] for message in result.messages] == [text for _, _, text in TOLD]
    assert result.failed_calls == sum(text.startswith("error") for _, _, text in TOLD)
    assert tools["twice"].schema["function"]["parameters"]["properties"] == {"number": {"type": "integer"}}
