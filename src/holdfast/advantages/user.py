"""Advantages computed by a user's function from the groups of a step; the result is checked before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from holdfast.advantages.group import RewardMatrix
from holdfast.errors import RunStopped
from holdfast.text.escaping import error_words


class Groups(NamedTuple):
    """The completions of a step, of all ranks: G completions of each of P prompts, as NumPy arrays in float64."""

    rewards: RewardMatrix
    """[P, G] weighted sum of the rewards; NaN where a completion was not scored."""
    parts: Mapping[str, RewardMatrix]
    """[P, G] each: unweighted values of a reward by its name; NaN where a reward gave no number."""
    lengths: RewardMatrix
    """[P, G] number of tokens of each completion."""


class AdvantageFailed(RunStopped):  # noqa: N818 - the name says what happened
    """A user's advantage function raised or returned an invalid result; the last complete step was saved."""


def user_advantages(function: Callable[[Groups], object], groups: Groups, name: str) -> RewardMatrix:
    """Return what a function makes of the groups, [P, G] float64; 0 where a completion was not scored.

    Args:
        function: Takes the groups; what it does to their arrays is seen by nobody.
        groups: All of a step.
        name: Of the function, for messages.

    Raises:
        AdvantageFailed: It raises, gives another shape, or no finite number for a completion that was scored.
    """
    copied_groups = Groups(
        groups.rewards.copy(), {key: rewards.copy() for key, rewards in groups.parts.items()}, groups.lengths.copy()
    )
    prompts, size = groups.rewards.shape
    try:
        values = np.asarray(function(copied_groups), dtype=np.float64)
    except (Exception, SystemExit) as error:  # the user's own code may raise anything, and return anything
        raise AdvantageFailed(
            f"advantage.path {name}, given the rewards of {prompts} prompts with {size} completions each, raises "
            f"{error_words(error):.300}. It must return {prompts} x {size} numbers; mend the function."
        ) from error
    if values.shape != groups.rewards.shape:
        raise AdvantageFailed(
            f"advantage.path {name} gave an array of shape {list(values.shape)} for rewards of shape "
            f"{[prompts, size]}. It must return one number for each completion, in the same places."
        )
    scored = np.isfinite(groups.rewards)
    wrong = np.argwhere(scored & ~np.isfinite(values))
    if wrong.size:
        row, column = (int(number) for number in wrong[0])
        raise AdvantageFailed(
            f"advantage.path {name} gave {values[row, column]} for {len(wrong)} of {int(scored.sum())} scored "
            f"completions, the first of them number {column} of prompt {row}, whose reward is "
            f"{groups.rewards[row, column]:g}; the rewards of its group are {groups.rewards[row].tolist()}. Return "
            "finite numbers, such as 0 where there is nothing to learn."
        )
    return np.where(scored, values, 0.0)
