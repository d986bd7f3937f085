"""Agents that own their loop: a function or a program of the user's that asks the policy over HTTP, run in a worker."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from holdfast import registry
from holdfast.config.sections.environment import UNIX
from holdfast.environments.base import Malformed, StepResult, number_of, result_of
from holdfast.environments.forms import Form
from holdfast.environments.instances import SUBJECT, EnvironmentSource, Kind
from holdfast.processes.user_code import CannotStart, load_name, seed_generators

_BASE_URL, _API_KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
"""What OpenAI's clients read."""


@dataclass(frozen=True)
class AgentSource(EnvironmentSource):
    """What runs the agent of an episode; there is no environment.

    Args:
        agent: Takes the row, the address of the endpoint and the key of the session.
        clear: Removes what a worker that was killed left; takes its process number.
    """

    agent: Callable[..., Any] | None = None
    clear: Callable[[int], None] | None = None

    def run(self, row: Mapping[str, Any], seed: int, base_url: str, api_key: str) -> StepResult:
        """Run the agent of one episode to its end.

        Raises:
            Malformed: It returned something else than a reward.
        """
        assert self.agent is not None
        seed_generators(seed, seed)
        value = Form(None).awaited(self.agent(row, base_url, api_key, **self.kwargs))
        if value is None:
            return StepResult(done=True)
        reward = number_of(value)
        if reward is not None:
            return StepResult(reward=reward, done=True)
        try:
            return replace(result_of(value), done=True)
        except Malformed:
            raise Malformed(
                f"returned a {type(value).__name__} ({repr(value)[:80]}), and an agent returns its reward: a finite "
                "number, an Observation, or None"
            ) from None


def load_agent(section: Mapping[str, Any], base: Path) -> AgentSource:
    """Import what a section names.

    Raises:
        CannotStart: It is not there or cannot be run, or takes something else than a row, an address and a key.
    """
    kinds, kwargs = {"": Kind(None, Form, (), replayable=False)}, section["kwargs"]
    if section["run"] is None:
        if section["sandbox"] is not None:
            recipe = registry.load(registry.SANDBOX)(section["sandbox"], base)
            return AgentSource(kinds, {}, agent=partial(_run_sandboxed, section["command"], recipe), clear=recipe.clear)
        program = section["command"][0]
        if shutil.which(base / program if os.sep in program else program) is None:
            raise CannotStart(
                f"{SUBJECT}.command: {program} is no program that this machine can run. Install it, name a file below "
                f"{base} that is executable, or begin with its interpreter, as in [python, agent.py]."
            )
        return AgentSource(kinds, {}, agent=partial(_run_program, section["command"], base))
    function, file = load_name(section["run"], base, SUBJECT)
    try:
        inspect.signature(function).bind({}, "", "", **kwargs)
    except TypeError as error:
        raise CannotStart(
            f"{SUBJECT}: {section['run'].rpartition(':')[2]} in {file} cannot be called with (row, base_url, api_key): "
            f"{error}. Write `def agent(row, base_url, api_key)`, and name further arguments in environment.kwargs."
        ) from None
    return AgentSource(kinds, kwargs, agent=function)


def _run_program(command: list[str], base: Path, row: Mapping[str, Any], base_url: str, api_key: str) -> None:
    """Run a program; its worker's environment, where the key stands, is of this episode alone.

    Raises:
        ProgramFailed: It ended with another exit code than 0.
    """
    os.putenv(_BASE_URL, base_url)
    os.putenv(_API_KEY, api_key)
    text = json.dumps(dict(row), default=str)
    done = subprocess.run(command, cwd=base, input=text, text=True, check=False)
    if done.returncode:
        raise ProgramFailed(f"{command[0]} ended with exit code {done.returncode}")


def _run_sandboxed(command: list[str], recipe: Any, row: Mapping[str, Any], base_url: str, api_key: str) -> None:
    """Run a program in a sandbox, which gets the session's key of this process's environment and nothing else.

    Raises:
        ProgramFailed: It ended with another exit code than 0, or at a limit of its sandbox (137).
    """
    started = recipe.command(command, row, base_url.removeprefix(f"{UNIX}:"))
    text, variables = json.dumps(dict(row), default=str), {_API_KEY: api_key}
    variables |= {"PATH": os.defpath} if recipe.passes_environment else dict(os.environ) | variables
    done = subprocess.run(started, input=text, text=True, check=False, env=variables)
    if done.returncode:
        raise ProgramFailed(f"{command[0]} ended in its sandbox with exit code {done.returncode}")


class ProgramFailed(Exception):  # noqa: N818 - the name says what happened
    """The program of `environment.command` failed."""
