"""The forms that a user's environment may have, behind one: how it begins, takes a turn, runs tools and rewards."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.environments.base import (
    APPENDED,
    Malformed,
    Message,
    StepResult,
    ToolCall,
    Turn,
    messages_of,
    number_of,
    result_of,
)
from holdfast.environments.tools import CallMistake, Tool, UnknownTool, arguments_of
from holdfast.processes.user_code import describe_error

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class Form:
    """An environment of one episode in the form of `Environment`, or none at all where there are tools alone.

    Args:
        world: The user's object; None where there are tools alone.
    """

    def __init__(self, world: Any) -> None:
        self.world = world
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, row: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        """Start from a row.

        Raises:
            Malformed: It returned no messages.
        """
        if self.world is None:
            return ()
        wants_seed = "seed" in inspect.signature(self.world.begin).parameters
        return messages_of(self.world.begin(row, **({"seed": seed} if wants_seed else {})))

    def step(self, turn: Turn) -> StepResult:
        """Take a turn that calls nothing.

        Raises:
            Malformed: It returned no observation.
        """
        step = getattr(self.world, "step", None)
        if step is None:
            return StepResult(done=True)
        result = result_of(step(turn))
        if not result.done and not result.messages:
            raise Malformed("returned an Observation without messages that does not end the episode")
        return result

    def final_reward(self) -> float:
        """Return what the episode is rewarded with when it has ended, besides what its turns were."""
        return 0.0

    def run(self, tool: Tool, call: ToolCall) -> Any:
        """Return what a tool returns; one that is a coroutine is waited for."""
        arguments = self.arguments(tool, call)
        return self.awaited(tool.function(*([self.world] if tool.is_method else []), **arguments))

    def awaited(self, value: Any) -> Any:
        """Return what a coroutine returns, any other value as it is; all of an episode run in one event loop."""
        if not inspect.iscoroutine(value):
            return value
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(value)

    def arguments(self, tool: Tool, call: ToolCall) -> dict[str, Any]:
        """Return the arguments of a call as the tool takes them.

        Raises:
            CallMistake: One is missing, unknown, or of another type.
        """
        return arguments_of(tool, call)

    def text_of(self, outcome: Any) -> str:
        """Return what the policy reads of a tool's outcome."""
        return outcome if isinstance(outcome, str) else json.dumps(outcome, ensure_ascii=False, default=_written)

    def text_of_error(self, error: Exception) -> str:
        """Return what the policy reads of a call that cannot be made, or whose tool raised."""
        return f"error: {error if isinstance(error, CallMistake) else describe_error(error)}"

    def close(self) -> None:
        """Give everything back."""
        close = getattr(self.world, "close", None)
        if close is not None:
            close()


class FormOfTRL(Form):
    """What TRL's `environment_factory` makes: `reset(**row)`, public methods as tools, and perhaps `get_reward()`.

    Tools are called with what the policy wrote, and the policy reads what TRL would let it read.
    """

    def begin(self, row: Mapping[str, Any], seed: int) -> tuple[Message, ...]:  # noqa: ARG002 - `reset` takes none
        """Reset it with the columns of a row."""
        return messages_of(self.world.reset(**row), APPENDED)

    def step(self, turn: Turn) -> StepResult:  # noqa: ARG002 - whatever it says
        """End the episode, as a turn without calls does."""
        return StepResult(done=True)

    def final_reward(self) -> float:
        """Return what `get_reward` does.

        Raises:
            Malformed: It returned no number.
        """
        get_reward = getattr(self.world, "get_reward", None)
        if get_reward is None:
            return 0.0
        reward = number_of(self.awaited(get_reward()))
        if reward is None:
            raise Malformed("returned from get_reward what is no finite number")
        return reward

    def arguments(self, tool: Tool, call: ToolCall) -> dict[str, Any]:  # noqa: ARG002 - no type is looked at
        """Return the arguments as they were written."""
        return dict(call.arguments)

    def text_of(self, outcome: Any) -> str:
        """Return the outcome as Python writes it."""
        return str(outcome)

    def text_of_error(self, error: Exception) -> str:
        """Return the error's text in a dictionary."""
        return str({"error": f"Tool {error.name} not found." if isinstance(error, UnknownTool) else str(error)})

    def close(self) -> None:
        """Do nothing: `close` is a tool like any other public method."""


class FormOfGymnasium(Form):
    """An environment of gymnasium: `reset(seed)`, and `step(action)` with the action that `parse` reads in a turn.

    Args:
        world: The environment.
        parse: From text to action; what it raises, and None, is no action.
    """

    def __init__(self, world: Any, parse: Callable[[str], Any]) -> None:
        super().__init__(world)
        self._parse = parse

    def begin(self, row: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        """Reset it with the seed of a row that has one, else of the episode."""
        observation, _ = self.world.reset(seed=row.get("seed", seed))
        return messages_of(self._text(observation))

    def step(self, turn: Turn) -> StepResult:
        """Take the action that a turn says; the policy is told of one that says none."""
        try:
            action = self._action(turn.text)
        except Exception as error:  # noqa: BLE001 - the border to a user's function; the policy is told
            return StepResult(messages_of(self.text_of_error(error)), failed_calls=1)
        observation, reward, terminated, truncated, info = self.world.step(action)
        observed = {"messages": self._text(observation), "reward": reward, "done": terminated or truncated}
        return result_of({**observed, "info": info})

    def _action(self, text: str) -> Any:
        action = self._parse(text)
        if action is None or not self.world.action_space.contains(action):
            raise CallMistake(f"{text!r} is no action of {self.world.action_space}")
        return action

    def _text(self, observation: Any) -> str:
        """Return a rendering in text where there is one, else the observation as Python writes it."""
        if getattr(self.world, "render_mode", None) == "ansi":
            return str(self.world.render())
        return str(_plain(observation))


def _written(value: Any) -> str:
    """Return what is no JSON as Python writes it.

    Raises:
        TypeError: That names an address in memory, which differs from process to process.
    """
    text = str(value)
    if _ADDRESS.search(text):
        raise TypeError(f"returned a {type(value).__name__}, which is neither text nor JSON")
    return text


def _plain(value: Any) -> Any:
    """Return numbers and arrays of NumPy as Python's: they are written without their types."""
    if isinstance(value, tuple | list):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
