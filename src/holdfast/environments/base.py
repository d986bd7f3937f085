"""What an environment is given and what it returns. Workers import this file, so it imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

Message = Mapping[str, Any]
"""`role` and `content`, and where they apply `name` and `tool_call_id`."""

EnvironmentFault = Literal["timeout", "died", "raised", "malformed"]
"""It gave no answer in time, its process ended, it raised, or it returned what is no observation."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, as a policy wrote it in a turn."""

    name: str
    """Name of the tool."""
    arguments: Mapping[str, Any]
    """Arguments by parameter, as JSON holds them."""
    mistake: str = ""
    """Reason why the text could not be read as a call; "" if it could."""


@dataclass(frozen=True)
class Turn:
    """A turn of the policy."""

    number: int
    """Index of the turn in its episode, from 0."""
    text: str
    """Text without special tokens."""
    calls: tuple[ToolCall, ...] = ()
    """Calls of tools, in the order of the text."""
    finish: str = "stop"
    """Reason of the end: "stop", or "length" where the turn was cut at `rollout.max_new_tokens`."""


@dataclass(frozen=True)
class Observation:
    """The result of a turn."""

    messages: Sequence[Message] | str = ()
    """Messages that the policy reads next; a text is one message of role `user`. Not empty unless `done`."""
    reward: float = 0.0
    """Finite number, which is added to the reward of the episode."""
    done: bool = False
    """Whether the episode ends here."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the metrics `environment/info/NAME`; the last of each name counts."""


class Environment(Protocol):
    """A world for one episode, made anew for each. An exception in a method ends the episode as a fault.

    Its public methods beyond these, with types, are tools that the policy may call. A turn with calls runs them, and
    any other turn is a `step`; without a `step` it ends the episode. A class attribute `replayable = True` promises
    that equal rows, seeds and turns give equal observations.
    """

    def begin(self, row: Mapping[str, Any]) -> Sequence[Message] | str | None:
        """Start the episode.

        Args:
            row: Columns of the row. A second parameter, `seed`, receives an integer if the method has it.

        Returns:
            Messages that follow the row's prompt; a text is one message of role `user`. None: no messages.
        """

    def step(self, turn: Turn) -> Observation:
        """Take a turn without calls of tools.

        Args:
            turn: The turn of the policy.

        Returns:
            The messages, reward and end that follow from the turn.
        """

    def close(self) -> None:
        """Release the resources of the episode; optional."""


@dataclass(frozen=True)
class StepResult:
    """What a worker says of a turn, as it travels in JSON."""

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, float] = field(default_factory=dict)
    called: Mapping[str, int] = field(default_factory=dict)
    """Calls by tool; those of tools that are not there by the name `unknown`."""
    failed_calls: int = 0
    """Calls that could not be made, or whose tool raised; what went wrong is their observation."""


def is_answer(value: object) -> bool:
    """Return whether a value is an answer of a worker: a fault with its message, or a `StepResult`."""
    match value:
        case {"fault": "malformed" | "raised", "message": str(), **others}:
            return not others
        case {
            "result": {
                "messages": list(messages),
                "reward": int() | float() as reward,
                "done": bool(),
                "info": dict(info),
                "called": dict(called),
                "failed_calls": int(),
                **fields,
            },
            **others,
        }:
            numbers_are_finite = all(number_of(number) is not None for number in (reward, *info.values()))
            counts_are_whole = all(isinstance(count, int) for count in called.values())
            return not fields and not others and numbers_are_finite and counts_are_whole and _are_messages(messages)
    return False


APPENDED = "appended"
"""Role of a text that is no message of its own: it goes behind the last message of the user, as TRL's `reset` says."""


class Malformed(TypeError):
    """What an environment returned is no observation, or a row names none that is there."""


KIND_COLUMN = "environment"
"""A row's column that names its environment, where there are several."""


def kind_of(row: Mapping[str, Any], names: Collection[str]) -> str:
    """Return the name of a row's environment; "" where there is one, which has no name.

    Raises:
        Malformed: The row names none that is there.
    """
    if "" in names:
        return ""
    name = row.get(KIND_COLUMN)
    if name not in names:
        said = f"has {KIND_COLUMN} {name!r}" if KIND_COLUMN in row else f"has no column {KIND_COLUMN}"
        raise Malformed(f"{said}, and there is {', '.join(names)}")
    return str(name)


def messages_of(value: object, role: str = "user") -> tuple[Message, ...]:
    """Return what an environment wants to be read as messages.

    Raises:
        Malformed: It is neither text nor messages.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        return ({"role": role, "content": value},)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple) or not _are_messages(value):
        raise Malformed(f"returned {_kind(value)}, which is neither text nor a list of messages (role and content)")
    return tuple(value)


def _are_messages(values: Sequence[object]) -> bool:
    return all(
        isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("role", "content"))
        for value in values
    )


MOST_LEVELS = 100
"""Of what a message or a schema holds: what is nested more deeply ends the recursion of whoever reads it."""


_MOST_ITEMS = 1 << 20
"""Of what is looked through: a value that holds itself several times has no end of them in 100 levels."""


class Extent(NamedTuple):
    """How large a value is that JSON may hold."""

    levels: int
    """Of lists and mappings in each other; one more than `MOST_LEVELS` of a value that is larger than is looked at."""
    characters: int
    """Of its texts, the keys of mappings included."""


def extent_of(value: object) -> Extent:
    """Return how large a value is, without a recursion."""
    levels, characters, count, layer = 0, 0, 0, [value]
    while layer and levels <= MOST_LEVELS:
        inner: list[object] = []
        for item in layer:
            if count + len(inner) > _MOST_ITEMS:
                return Extent(MOST_LEVELS + 1, characters)
            if isinstance(item, str):
                characters += len(item)
            elif isinstance(item, Mapping):
                inner += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple):
                inner += item
        levels, count = levels + bool(inner), count + len(inner)
        layer = inner
    return Extent(levels, characters)


def result_of(value: object) -> StepResult:
    """Return what a `step` said: an `Observation`, or a mapping of its fields.

    Raises:
        Malformed: It is something else.
    """
    if isinstance(value, Mapping) and value.keys() <= Observation.__dataclass_fields__.keys():
        value = Observation(**value)
    if not isinstance(value, Observation):
        raise Malformed(f"returned {_kind(value)}, and a step returns an Observation")
    reward = number_of(value.reward)
    if reward is None:
        raise Malformed(f"returned the reward {_kind(value.reward)}, which is no finite number")
    if number_of(value.done) not in {0.0, 1.0}:
        raise Malformed(f"returned the done {_kind(value.done)}, which is no truth value")
    if not isinstance(value.info, Mapping):
        raise Malformed(f"returned the info {_kind(value.info)}, which is no mapping")
    info = {str(name): number for name, item in value.info.items() if (number := number_of(item)) is not None}
    return StepResult(messages_of(value.messages), reward, bool(value.done), info)


def number_of(value: object) -> float | None:
    """Return a finite number of Python or NumPy as a float; None for anything else."""
    if isinstance(value, str | bytes):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]  # whatever cannot be a number raises
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _kind(value: object) -> str:
    text = repr(value)
    return f"a {type(value).__name__} ({text[:80]})"
