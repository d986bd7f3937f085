"""Build rewards from their configuration sections (plain dicts), in the worker process; imports users' files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import registry
from holdfast.processes.user_code import CannotStart, describe_error, load_name
from holdfast.rewards.functions.rules import rule, template_columns
from holdfast.rewards.functions.signatures import Bound, ConcurrentCall, PerSampleCall, bind

_SCORER_GRACE_SECONDS = 5.0
"""Beyond a reward's own limits, for starting and ending what it runs."""


@dataclass(frozen=True)
class ReadyReward:
    """A built reward: its name, its function bound to samples, and its time limit."""

    name: str
    bound: Bound
    seconds: float
    """Time limit for one sample."""
    columns: tuple[str, ...] = ()
    """Row columns that it requires."""
    clear: Callable[[int], None] | None = None
    """Removes what a killed process left; takes its number."""


def build(section: Mapping[str, Any], name: str, base: Path, seconds: float) -> ReadyReward:
    """Make a reward of its section; a user's file is imported here.

    Raises:
        CannotStart, ConfigError: The reward cannot work in this environment.
    """
    own_seconds = 0.0
    clear: Callable[[int], None] | None = None
    bound: Bound
    match section["kind"]:
        case "path":
            function, wants_kwargs = load_callable(section["path"], base, name, section["kwargs"])
            bound = bind(function, section["kwargs"] if wants_kwargs else {}, name)
        case "math":
            from holdfast.rewards.functions.mathematics import MathReward

            bound = PerSampleCall(MathReward.checked(section["column"], name))
        case "judge":
            from holdfast.rewards.functions.judge import Judge

            judge = Judge.of(section, name)
            bound, own_seconds = ConcurrentCall(judge), judge.endpoint.longest_seconds
        case "code":
            code = registry.load(registry.CODE_REWARD)(section)
            bound, own_seconds, clear = PerSampleCall(code), code.timeout_seconds, code.clear
        case _:
            bound = PerSampleCall(rule(section))
    longest = max(seconds, own_seconds + _SCORER_GRACE_SECONDS) if own_seconds else seconds
    return ReadyReward(name, bound, longest, bound.columns or template_columns(section), clear)


def load_callable(path: str, base: Path, name: str, kwargs: Mapping[str, Any]) -> tuple[Callable[..., Any], bool]:
    """Import `file.py:function`, looked up beside the YAML, then where the run starts, or `package.module:function`.

    Returns:
        The function, and whether the kwargs are still to be given to it; those of a class went to its constructor.

    Raises:
        CannotStart: File, module or function is not there, its code raises or starts threads, or the class refuses.
    """
    function, module_file = load_name(path, base, f"reward {name}")
    function_name = path.rpartition(":")[2]
    if not inspect.isclass(function):
        return function, True
    try:
        instance: Any = function(**kwargs)
    except Exception as error:
        raise CannotStart(
            f"reward {name}: the constructor of {function_name} in {module_file} raises {describe_error(error)}. "
            "Correct it, or its kwargs."
        ) from error
    if not callable(instance):
        raise CannotStart(f"reward {name}: {function_name} in {module_file} has no __call__. Give it one: it scores.")
    return instance, False
