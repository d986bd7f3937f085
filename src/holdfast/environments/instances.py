"""From the `environment` section, as a plain dict, to instances: one for each episode, in a worker.

A user's file is imported here.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.environments.base import (
    Malformed,
    Message,
    Observation,
    StepResult,
    ToolCall,
    Turn,
    messages_of,
    number_of,
    result_of,
)
from holdfast.environments.tools import CallMistake, Tool, arguments_of, tool_of
from holdfast.rewards.base import CannotStart, describe_error
from holdfast.rewards.scorers import load_name

SUBJECT = "environment"
APPENDED = "appended"
"""Role of a text that is no message of its own: it goes behind the last message of the user, as TRL's `reset` says."""
_PROTOCOL = ("begin", "step", "close")
_OF_TRL = ("reset", "get_reward")


@dataclass(frozen=True)
class EnvironmentSource:
    """What instances are made of.

    Args:
        made_by: The user's class; None where there are tools alone.
        kwargs: For its constructor.
        tools: What a policy may call.
    """

    made_by: Callable[..., Any] | None
    kwargs: Mapping[str, Any]
    tools: tuple[Tool, ...]

    @property
    def replayable(self) -> bool:
        """Whether equal rows, seeds and turns give equal observations; functions alone are taken to."""
        return self.made_by is None or bool(getattr(self.made_by, "replayable", False))

    def instance(self, seed: int) -> Instance:
        """Return an environment for one episode."""
        _seed(seed)
        return Instance(self, None if self.made_by is None else self.made_by(**self.kwargs), seed)


def load(section: Mapping[str, Any], base: Path) -> EnvironmentSource:
    """Import what a section names.

    Raises:
        CannotStart: It is not there, or is no environment or no tool.
    """
    tools = [tool_of(load_name(path, base, SUBJECT)[0], SUBJECT) for path in section["tools"]]
    made_by: Callable[..., Any] | None = None
    if section["path"] is not None:
        made_by, file = load_name(section["path"], base, SUBJECT)
        tools += _tools_of_class(made_by, file)
    names = [tool.name for tool in tools]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise CannotStart(f"{SUBJECT}: two tools are called {repeated[0]}, and a call would not say which. Rename one.")
    return EnvironmentSource(made_by, section["kwargs"], tuple(tools))


def _tools_of_class(made_by: Any, file: str) -> list[Tool]:
    if not inspect.isclass(made_by):
        raise CannotStart(
            f"{SUBJECT}: {made_by.__name__} in {file} is no class. Name one; each episode has an instance."
        )
    if not (hasattr(made_by, "begin") or hasattr(made_by, "reset")):
        raise CannotStart(
            f"{SUBJECT}: {made_by.__name__} in {file} has neither begin nor reset, so it cannot start from a row. Give "
            "it begin(self, row)."
        )
    reserved = _PROTOCOL if hasattr(made_by, "begin") else _OF_TRL
    methods = [
        function
        for name, function in inspect.getmembers(made_by, inspect.isfunction)
        if not name.startswith("_") and name not in reserved
    ]
    tools = [tool_of(function, SUBJECT, is_method=True) for function in methods]
    if not tools and not hasattr(made_by, "step"):
        raise CannotStart(
            f"{SUBJECT}: {made_by.__name__} in {file} has no step and no public method, so nothing would come of a "
            "turn. Give it step(self, turn), or methods with types, which are tools."
        )
    return tools


class Instance:
    """One environment, for one episode.

    Args:
        source: What it is made of.
        world: The user's object; None where there are tools alone.
        seed: Of its episode.
    """

    def __init__(self, source: EnvironmentSource, world: Any, seed: int) -> None:
        self._tools = {tool.name: tool for tool in source.tools}
        self._world, self._seed = world, seed
        self._is_of_trl = world is not None and not hasattr(world, "begin")

    def begin(self, row: Mapping[str, Any]) -> tuple[Message, ...]:
        """Start from a row.

        Raises:
            Malformed: It returned no messages.
        """
        if self._world is None:
            return ()
        if self._is_of_trl:
            return messages_of(self._world.reset(**row), APPENDED)
        wants_seed = "seed" in inspect.signature(self._world.begin).parameters
        return messages_of(self._world.begin(row, **({"seed": self._seed} if wants_seed else {})))

    def take(self, turn: Turn) -> StepResult:
        """Run what a turn calls, or step.

        Raises:
            Malformed: It returned no observation.
        """
        step = getattr(self._world, "step", None)
        if turn.calls:
            result = self._called(turn)
        elif step is not None and not self._is_of_trl:
            result = result_of(step(turn))
            if not result.done and not result.messages:
                raise Malformed("returned an Observation without messages that does not end the episode")
        else:
            result = StepResult(done=True)
        return self._with_final_reward(result) if result.done else result

    def finish(self) -> StepResult:
        """Return the reward of an episode that ended otherwise than by the environment."""
        return self._with_final_reward(StepResult(done=True))

    def close(self) -> None:
        """Give everything back."""
        close = getattr(self._world, "close", None)
        if close is not None:
            close()

    def _with_final_reward(self, result: StepResult) -> StepResult:
        get_reward = getattr(self._world, "get_reward", None) if self._is_of_trl else None
        if get_reward is None:
            return result
        reward = number_of(get_reward())
        if reward is None:
            raise Malformed("returned from get_reward what is no finite number")
        return replace(result, reward=result.reward + reward)

    def _called(self, turn: Turn) -> StepResult:
        messages: list[Message] = []
        called: Counter[str] = Counter()
        total, done, failed, info = 0.0, False, 0, dict[str, float]()
        for index, call in enumerate(turn.calls):
            called[call.name if call.name in self._tools else "unknown"] += 1
            outcome = self._call(call)
            if isinstance(outcome, _Failure):
                failed += 1
                content = f"error: {outcome.why}"
            elif isinstance(outcome, Observation):
                result = result_of(replace(outcome, messages=messages_of(outcome.messages, "tool")))
                content = "\n".join(message["content"] for message in result.messages)
                total, done, info = total + result.reward, done or result.done, {**info, **result.info}
            else:
                content = outcome if isinstance(outcome, str) else json.dumps(outcome, ensure_ascii=False, default=str)
            number = f"{turn.number % 10**5:05d}{index % 10**4:04d}"
            messages.append({"role": "tool", "name": call.name, "tool_call_id": number, "content": content})
        return StepResult(tuple(messages), total, done, info, dict(called), failed)

    def _call(self, call: ToolCall) -> Any:
        """Return what a tool returns, or why it cannot be called: the policy reads either."""
        if call.mistake:
            return _Failure(call.mistake)
        tool = self._tools.get(call.name)
        if tool is None:
            return _Failure(f"there is no tool {call.name}; there is {', '.join(self._tools) or 'none'}")
        try:
            arguments = arguments_of(tool, call)
        except CallMistake as mistake:
            return _Failure(str(mistake))
        try:
            return tool.function(*([self._world] if tool.is_method else []), **arguments)
        except Exception as error:  # noqa: BLE001 - the border to a user's function; the policy is told
            return _Failure(describe_error(error))


@dataclass(frozen=True)
class _Failure:
    why: str


def _seed(seed: int) -> None:
    """Make what draws numbers draw the same in any worker and after any restart."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
