"""Direct preference optimisation and its kin.

Raise what was chosen above what was rejected, relative to the model at start. Rafailov et al. (arXiv:2305.18290). Which
loss compares the two answers is the configuration's business (`preference`); some need no reference, and KTO takes
single answers with a label.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.config.verbs.dpo import DPOConfig
from holdfast.parallel.mesh import World
from holdfast.training.build.begin import Live
from holdfast.training.fit import Outcome, fit
from holdfast.training.preference.build import build_preference_run
from holdfast.training.preference.run import (
    PreferenceRun,
    compared_with_reference,
    evaluate_preferences,
    with_margins,
)
from holdfast.training.step import train_step


def dpo(config: DPOConfig, base: Path, world: World, live: Live | None = None) -> Outcome:
    """Train, evaluate and export as the configuration says."""
    run = build_preference_run(config, base, world, live)
    outcome = fit(run, dpo_step, evaluate_preferences)
    run.ranks.close()
    return outcome


def dpo_step(run: PreferenceRun) -> dict[str, float] | None:
    """Ask the reference, and make one update; None when the data has ended."""
    with run.phase("data"):
        mini_batch = run.stream.next(run.state.step)
    return None if mini_batch is None else with_margins(train_step(run, compared_with_reference(run, mini_batch)))
