"""The sample that a reward scores, and its outcome. Workers import this file, so it imports nothing heavy."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from holdfast.processes.user_code import describe_raised
from holdfast.text.shortening import shortened

LARGEST = 1e30
"""Largest magnitude of a reward; the squares of larger ones, and their sums, could overflow."""

Fault = Literal["timeout", "error", "nan", "none"]
FAULTS: tuple[Fault, ...] = get_args(Fault)


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run, under the names of TRL's trainer_state."""

    global_step: int = 0
    """Number of steps done."""
    max_steps: int = 0
    """Number of steps of the whole run; 0 if unknown."""
    epoch: float | None = None
    """Number of passes over the rows so far; None if unknown."""


@dataclass(frozen=True)
class Sample:
    """A completion to score, with its prompt and its row."""

    sample_id: int
    """Number of the completion, the same on every number of ranks."""
    prompt: str
    """Text of the prompt."""
    completion: str
    """Text of the completion; of an episode, its last answer."""
    prompt_tokens: list[int]
    """Token ids of the prompt."""
    completion_tokens: list[int]
    """Token ids of the completion."""
    finish: str
    """Reason of the end: "stop", "length", "abort" or "error"."""
    row: Mapping[str, Any]
    """Columns of the prompt's row. Plain values: what they need to be unpickled is imported in the workers."""
    progress: RunProgress = RunProgress()
    """Progress of the run."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """Conversation of an episode; None of a single answer."""
    prompt_messages: int = 0
    """Number of leading `messages` that are the prompt."""
    environment_reward: float | None = None
    """Reward of an episode's environment, summed over its turns; None of a single answer."""


@dataclass(frozen=True)
class Scored:
    """The reward of one completion."""

    reward: float | None
    """The weighted sum over the rewards; None if the sample is not scored."""
    parts: Mapping[str, float | None]
    """Unweighted value of each reward by its name; components of a reward that returned a dict by name/component."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics, as name/metric."""
    fault: Fault | None = None
    """Kind of the fault, if a reward failed, whether the sample is dropped or gets a fixed value."""
    drop: Literal["sample", "group"] | None = None
    message: str = ""
    """What went wrong, where, for which completion."""


@dataclass(frozen=True)
class SampleOutcome:
    """The result of one reward for one sample, which a worker sends as JSON."""

    value: float | None = None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    fault: Fault | None = None
    message: str = ""
    """Description of a fault, a clause that follows the name of the reward."""
    is_cut_short: bool = False
    """Whether the time limit of the whole step was reached, so that this sample need not have caused it."""
    is_malformed: bool = False
    """Whether the function returned a value of a wrong type, or a wrong number of values."""


def is_number(value: float) -> bool:
    """Say whether a reward can be compared with others: it is finite, and not beyond `LARGEST`."""
    return abs(value) <= LARGEST


class MissingArgument(LookupError):
    """A parameter of a reward function for which neither the row, nor the sample, nor the kwargs have a value."""


VALUE_KEYS = ("reward", "overall", "score")
"""Keys of a dict that hold the reward, the first one present; EasyR1 writes `overall`, verl `score`."""
_SHOWN = 200


def outcome_of(result: object) -> SampleOutcome:
    """Return the outcome of a number, None, or a dict of a number with named parts and metrics."""
    if not isinstance(result, Mapping):
        return _of_value(result)
    key = next((key for key in VALUE_KEYS if key in result), None)
    if key is None:
        keys = ", ".join(map(str, result)) or "none"
        return _malformed(f"returned a dict without the key reward, overall or score (its keys: {keys})")
    main = _of_value(result[key])
    metrics = result.get("metrics", {})
    part_values = {str(name): value for name, value in result.items() if name not in {key, "metrics"}}
    return SampleOutcome(
        main.value,
        {name: _finite(value) for name, value in part_values.items() if value is None or _number(value) is not None},
        _finite_only(metrics) if isinstance(metrics, Mapping) else {},
        main.fault,
        main.message,
        is_malformed=main.is_malformed,
    )


def outcomes_of(results: object, count: int) -> list[SampleOutcome]:
    """Return the outcome of each of several completions from what one call returned for all of them.

    What is not one value for each is an error of all: nobody knows whose values they are.
    """
    # Arrays of NumPy and torch turn into lists by `tolist`; naming their types would import both here.
    tolist = getattr(results, "tolist", None)
    listed = tolist() if callable(tolist) else results
    if isinstance(listed, list | tuple) and len(listed) == count:
        return [outcome_of(result) for result in listed]
    if isinstance(listed, list | tuple):
        returned = f"{len(listed)} value" + "s" * (len(listed) != 1)
    else:
        returned = _kind_of(results)
    completions = f"{count} completion" + "s" * (count != 1)
    return [
        _malformed(f"returned {returned} for {completions}; a batched reward returns a list with one value for each")
    ] * count


def outcome_of_exception(error: BaseException) -> SampleOutcome:
    """Return the outcome of a call that raised: what, and in which line of whose file."""
    if isinstance(error, MissingArgument):
        return _error(f"cannot be called: {error}")
    return _error(describe_raised(error))


def _of_value(value: object) -> SampleOutcome:
    if value is None:
        return SampleOutcome(fault="none", message="returned None")
    number = _number(value)
    if number is None:
        return _malformed(f"returned {_kind_of(value)}; a reward is a number, None or a dict")
    if not is_number(number):
        why = ", and rewards lie within +-1e30" if math.isfinite(number) else ""
        return SampleOutcome(fault="nan", message=f"returned {number}{why}")
    return SampleOutcome(number)


def _kind_of(value: object) -> str:
    """Return what a value is, and text as it is."""
    if value is None:
        return "None"
    cited = f" {shortened(repr(value), _SHOWN)}" if isinstance(value, str | bytes) else ""
    return f"a {type(value).__name__}{cited}"


def _number(value: object) -> float | None:
    """Return a number of Python, NumPy or torch as a float; None for anything else."""
    if not isinstance(value, numbers.Real):
        # Scalars of NumPy and torch turn into Python's by `item`; naming their types would import both here.
        item = None if isinstance(value, str | bytes) else getattr(value, "item", None)
        try:
            value = item() if callable(item) else None
        except (TypeError, ValueError, RuntimeError):  # an array of several
            return None
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _finite(value: object) -> float | None:
    number = _number(value)
    return number if number is not None and math.isfinite(number) else None


def _finite_only(values: Mapping[Any, object]) -> dict[str, float]:
    finite = {str(name): _finite(value) for name, value in values.items()}
    return {name: value for name, value in finite.items() if value is not None}


def _error(message: str) -> SampleOutcome:
    return SampleOutcome(fault="error", message=message)


def _malformed(message: str) -> SampleOutcome:
    return SampleOutcome(fault="error", message=message, is_malformed=True)
