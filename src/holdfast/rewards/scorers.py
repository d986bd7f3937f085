"""From the sections of the configuration, as plain dicts, to what a worker calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import patience
from holdfast.rewards.functions.rules import template_columns
from holdfast.rewards.functions.signatures import Bound, Concurrent, Each


@dataclass(frozen=True)
class ReadyReward:
    """One reward, ready to be called."""

    name: str
    bound: Bound
    seconds: float
    """Longest time for one sample."""
    columns: tuple[str, ...] = ()
    """Columns of the row without which it scores nothing."""


def build(section: Mapping[str, Any], name: str, base: Path, seconds: float) -> ReadyReward:
    """Make a reward of its section; a user's file is imported here.

    Raises:
        CannotStart, ConfigError: The reward cannot work in this environment.
    """
    own_seconds = 0.0
    bound: Bound
    match section["kind"]:
        case "path":
            from holdfast.rewards.functions.load import load_callable
            from holdfast.rewards.functions.signatures import bind

            function, wants_kwargs = load_callable(section["path"], base, name, section["kwargs"])
            bound = bind(function, section["kwargs"] if wants_kwargs else {}, name)
        case "math":
            from holdfast.rewards.functions.mathematics import MathReward

            bound = Each(MathReward.checked(section["column"], name))
        case "judge":
            from holdfast.rewards.functions.judge import Judge

            judge = Judge.of(section, name)
            bound, own_seconds = Concurrent(judge), judge.seconds
        case "code":
            from holdfast.rewards.code.reward import CodeReward
            from holdfast.rewards.processes.folders import remove_abandoned

            code = CodeReward(section["column"], section["grade"], section["timeout_seconds"], section["memory_mib"])
            remove_abandoned()
            bound, own_seconds = Each(code), code.timeout_seconds
        case _:
            from holdfast.rewards.functions.rules import rule

            bound = Each(rule(section))
    longest = max(seconds, own_seconds + patience.current.scorer_grace_seconds) if own_seconds else seconds
    return ReadyReward(name, bound, longest, bound.columns or template_columns(section))
