"""What a reward sees, and what comes of it. Workers import this file, so it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

LARGEST = 1e30
"""Magnitude above which a reward is no number to compare: its square, and sums of squares, would leave the range."""

Fault = Literal["timeout", "error", "nan", "none"]
FAULTS: tuple[Fault, ...] = get_args(Fault)


@dataclass(frozen=True)
class RunProgress:
    """Where the run stands, under the names of TRL's trainer_state."""

    global_step: int = 0
    """Steps done."""
    max_steps: int = 0
    """Of the whole run; 0 if nobody knows."""
    epoch: float | None = None


@dataclass(frozen=True)
class Sample:
    """One completion to score."""

    sample_id: int
    prompt: str
    completion: str
    prompt_tokens: list[int]
    completion_tokens: list[int]
    finish: str
    """Why the completion ended: stop, length, abort or error."""
    row: Mapping[str, Any]
    """Every column of the prompt's row. Plain values: what they need to be unpickled is imported in the workers."""
    progress: RunProgress = RunProgress()


@dataclass(frozen=True)
class Scored:
    """The reward of one completion."""

    reward: float | None
    """The weighted sum over the rewards; None if the sample is not scored."""
    parts: Mapping[str, float | None]
    """What each reward gave before its weight, by its name; the named parts of a dict by name/part."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """By name/metric."""
    fault: Fault | None = None
    """What went wrong, whether it drops the sample or stands at a fixed value."""
    drop: Literal["sample", "group"] | None = None
    message: str = ""
    """What went wrong, where, for which completion."""


@dataclass(frozen=True)
class SampleOutcome:
    """What one reward said about one sample, as it travels out of a worker in JSON."""

    value: float | None = None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    fault: Fault | None = None
    message: str = ""
    """Of a fault: a clause that follows the name of the reward."""
    is_cut_short: bool = False
    """Whether a timeout is that of all samples together, which says nothing of this one."""


def is_number(value: float) -> bool:
    """Say whether a reward can be compared with others: it is finite, and not beyond `LARGEST`."""
    return abs(value) <= LARGEST


class CannotStart(Exception):  # noqa: N818 - the name says what happened
    """A reward cannot work in this environment; the message is a paragraph for the user."""
