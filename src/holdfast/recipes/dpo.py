"""Direct preference optimisation and its kin.

Raise what was chosen above what was rejected, relative to the model at start. Rafailov et al. (arXiv:2305.18290). Which
loss compares the two answers is the configuration's business (`preference`); some need no reference, and KTO takes
single answers with a label.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from holdfast.config.verbs.dpo import DPOConfig
from holdfast.parallel.mesh import World
from holdfast.training.fit import Outcome, fit
from holdfast.training.preference.build import build_preference_run
from holdfast.training.preference.run import (
    PreferenceTraining,
    compared_with_reference,
    evaluate_preferences,
    with_margins,
)
from holdfast.training.setup.begin import Live
from holdfast.training.step import train_step


def dpo(config: DPOConfig, base: Path, world: World, live: Live | None = None) -> Outcome:
    """Train, evaluate and export as the configuration says."""
    return train_preferences(build_preference_run(config, base, world, live))


def train_preferences(training: PreferenceTraining) -> Outcome:
    """Train, evaluate and export a run on preferences."""
    return fit(training, partial(dpo_step, training), partial(evaluate_preferences, training.evaluation))


def dpo_step(training: PreferenceTraining) -> dict[str, float] | None:
    """Ask the reference, and make one update; None when the data has ended."""
    policy = training.model
    with policy.run.phase("data"):
        mini_batch = training.stream.next(policy.state.step)
    if mini_batch is None:
        return None
    mini_batch = compared_with_reference(training.evaluation, mini_batch)
    return with_margins(train_step(policy, mini_batch, training.evaluation.objective).read().metrics)
