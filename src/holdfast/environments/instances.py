"""From the `environment` section, as a plain dict, to instances: one for each episode, in a worker.

A user's file is imported here.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from holdfast import registry
from holdfast.environments.base import (
    KIND_COLUMN,
    Message,
    Observation,
    StepResult,
    ToolCall,
    Turn,
    kind_of,
    messages_of,
    result_of,
)
from holdfast.environments.forms import Form, FormOfGymnasium, FormOfTRL
from holdfast.environments.tools import CallMistake, Tool, UnknownTool, tool_of
from holdfast.processes.user_code import CannotStart, describe_error, load_name, seed_generators

SUBJECT = "environment"
_PROTOCOL = ("begin", "step", "close")
_OF_TRL = ("reset", "get_reward")


@dataclass(frozen=True)
class Kind:
    """What an episode's environment is made of.

    Args:
        make: The user's class or factory; None where there are tools alone.
        form: Adapts what it makes.
        tools: What a policy may call.
        replayable: Whether equal rows, seeds and turns give equal observations; functions alone are taken to.
        answers: Whether a turn without calls is answered; else it ends the episode.
    """

    make: Callable[..., Any] | None
    form: Callable[[Any], Form]
    tools: tuple[Tool, ...]
    replayable: bool = True
    answers: bool = False


@dataclass(frozen=True)
class Servers:
    """Servers whose tools a policy may call besides, as a feature starts them."""

    tools: tuple[Tool, ...] = ()
    closing: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = ()
    """End the sessions of one episode."""
    kept: frozenset[int] = frozenset()
    """Processes that serve all episodes of a rank."""


_NONE = Servers()


@dataclass(frozen=True)
class EnvironmentSource:
    """What instances are made of.

    Args:
        kinds: By the name in a row's column, or one without a name for all rows.
        kwargs: Of whatever makes them.
        servers: What else is called.
    """

    kinds: Mapping[str, Kind]
    kwargs: Mapping[str, Any]
    servers: Servers = _NONE

    @property
    def replayable(self) -> bool:
        """Whether equal rows, seeds and turns give equal observations."""
        return all(kind.replayable for kind in self.kinds.values())

    def instance(self, row: Mapping[str, Any], seed: int) -> Instance:
        """Return an environment for one episode.

        Raises:
            Malformed: The row names none that is there.
        """
        seed_generators(seed, seed)
        name = kind_of(row, self.kinds)
        kind = self.kinds[name]
        form = kind.form(None if kind.make is None else kind.make(**self.kwargs))
        columns = {column: value for column, value in row.items() if not name or column != KIND_COLUMN}
        return Instance(form, kind.tools, columns, seed, self.servers)


def load(section: Mapping[str, Any], base: Path) -> EnvironmentSource:
    """Import what a section names.

    Raises:
        CannotStart: It is not there, or is no environment or no tool.
    """
    tools = [tool_of(load_name(path, base, SUBJECT)[0], SUBJECT) for path in section["tools"]]
    servers: Servers = registry.load(registry.TOOL_SERVERS)(section, base) if section["mcp"] else _NONE
    tools += servers.tools
    kwargs: Mapping[str, Any] = section["kwargs"]
    if section["path"] is None:
        alone = Kind(None, Form, _of_different_names(tools), replayable=not section["mcp"])
        return EnvironmentSource({"": alone}, kwargs, servers)
    value, file = load_name(section["path"], base, SUBJECT, also=dict)
    parse = None if section["action"] is None else load_name(section["action"], base, SUBJECT)[0]
    makers = value if isinstance(value, dict) else {"": value}
    kinds = {}
    for name, make in makers.items():
        label = f"{name or section['path'].rpartition(':')[2]} in {file}"
        if not callable(make):
            raise CannotStart(f"{SUBJECT}: {label} is {make!r}, which makes no environment. Name a class.")
        kind = _kind(make, kwargs, parse, tools, label)
        kinds[str(name)] = replace(kind, replayable=kind.replayable and not section["mcp"])
    if not kinds:
        raise CannotStart(f"{SUBJECT}: {section['path']} in {file} is empty. Give it environments by name.")
    return EnvironmentSource(kinds, kwargs, servers)


def _kind(
    make: Callable[..., Any],
    kwargs: Mapping[str, Any],
    parse: Callable[[str], Any] | None,
    tools: list[Tool],
    label: str,
) -> Kind:
    # What a function makes is known only when it has made one, and what gymnasium promises of it as well.
    made: Any = make if inspect.isclass(make) and parse is None else _made(make, kwargs, label)
    world = made if inspect.isclass(made) else type(made)
    if parse is not None:
        if not (hasattr(world, "reset") and hasattr(world, "step")):
            raise CannotStart(
                f"{SUBJECT}: {label} has no reset and step, and action is of environments of gymnasium. Leave action "
                "out, or name one of them."
            )
        made.close()
        spec = getattr(made, "spec", None)
        replayable = spec is not None and not spec.nondeterministic
        form_of_gymnasium = partial(FormOfGymnasium, parse=parse)
        return Kind(make, form_of_gymnasium, _of_different_names(tools), replayable, answers=True)
    if hasattr(world, "action_space") or hasattr(made, "action_space"):
        raise CannotStart(
            f"{SUBJECT}: {label} is an environment of gymnasium, which takes actions, and a turn is text. Set "
            "environment.action to a function (file.py:parse) from text to action."
        )
    form = Form if hasattr(world, "begin") else FormOfTRL
    all_tools = _of_different_names([*tools, *_tools_of_class(world, label)])
    answers = form is Form and hasattr(world, "step")
    return Kind(make, form, all_tools, bool(getattr(world, "replayable", False)), answers)


def _made(make: Callable[..., Any], kwargs: Mapping[str, Any], label: str) -> Any:
    try:
        return make(**kwargs)
    except Exception as error:
        raise CannotStart(
            f"{SUBJECT}: {label} raises {describe_error(error)} when it is called. Correct it, or environment.kwargs."
        ) from error


def _of_different_names(tools: list[Tool]) -> tuple[Tool, ...]:
    names = [tool.name for tool in tools]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise CannotStart(f"{SUBJECT}: two tools are called {repeated[0]}, and a call would not say which. Rename one.")
    return tuple(tools)


def _tools_of_class(world: type, label: str) -> list[Tool]:
    if not (hasattr(world, "begin") or hasattr(world, "reset")):
        raise CannotStart(
            f"{SUBJECT}: {label} has neither begin nor reset, so it cannot start from a row. Give it begin(self, row)."
        )
    reserved = _PROTOCOL if hasattr(world, "begin") else _OF_TRL
    tools = [
        tool_of(function, SUBJECT, is_method=not isinstance(inspect.getattr_static(world, name), staticmethod))
        for name, function in inspect.getmembers(world, inspect.isfunction)
        if not name.startswith("_") and name not in reserved
    ]
    if not tools and not hasattr(world, "step"):
        raise CannotStart(
            f"{SUBJECT}: {label} has no step and no public method, so nothing would come of a turn. Give it "
            "step(self, turn), or methods with types, which are tools."
        )
    return tools


class Instance:
    """One environment, for one episode.

    Args:
        form: What it is.
        tools: What may be called.
        row: What it starts from.
        seed: Of its episode.
        servers: Whose sessions end with it.
    """

    def __init__(
        self, form: Form, tools: tuple[Tool, ...], row: Mapping[str, Any], seed: int, servers: Servers = _NONE
    ) -> None:
        self._form, self._row, self._seed, self._servers = form, row, seed, servers
        self._tools = {tool.name: tool for tool in tools}

    def begin(self) -> tuple[Message, ...]:
        """Start from the row.

        Raises:
            Malformed: It returned no messages.
        """
        return self._form.begin(self._row, self._seed)

    def take(self, turn: Turn) -> StepResult:
        """Run what a turn calls, or step.

        Raises:
            Malformed: It returned no observation.
        """
        result = self._called(turn) if turn.calls else self._form.step(turn)
        return self._with_final_reward(result) if result.done else result

    def finish(self) -> StepResult:
        """Return the reward of an episode that ended otherwise than by the environment."""
        return self._with_final_reward(StepResult(done=True))

    def close(self) -> None:
        """Give everything back."""
        try:
            self._form.close()
        finally:
            for close in self._servers.closing:
                self._form.awaited(close())

    def _with_final_reward(self, result: StepResult) -> StepResult:
        return replace(result, reward=result.reward + self._form.final_reward())

    def _called(self, turn: Turn) -> StepResult:
        messages: list[Message] = []
        called: Counter[str] = Counter()
        total, done, failed, info = 0.0, False, 0, dict[str, float]()
        for index, call in enumerate(turn.calls):
            called[call.name if call.name in self._tools else "unknown"] += 1
            try:
                outcome = self._call(call)
                content = "" if isinstance(outcome, Observation) else self._form.text_of(outcome)
            except Exception as error:  # noqa: BLE001 - the border to a user's function; the policy is told
                failed += 1
                outcome, content = None, self._form.text_of_error(error)
            if isinstance(outcome, Observation):
                result = result_of(replace(outcome, messages=messages_of(outcome.messages, "tool")))
                content = "\n".join(message["content"] for message in result.messages)
                total, done, info = total + result.reward, done or result.done, {**info, **result.info}
            number = f"{turn.number % 10**5:05d}{index % 10**4:04d}"
            messages.append({"role": "tool", "name": call.name, "tool_call_id": number, "content": content})
        return StepResult(tuple(messages), total, done, info, dict(called), failed)

    def _call(self, call: ToolCall) -> Any:
        if call.mistake:
            raise CallMistake(call.mistake)
        if call.name not in self._tools:
            raise UnknownTool(call.name, tuple(self._tools))
        return self._form.run(self._tools[call.name], call)
