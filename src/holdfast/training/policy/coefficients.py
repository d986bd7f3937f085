"""Coefficients that follow a target: they live in the run's state, so a resumed run goes on with them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from holdfast.objectives.base import Objective
from holdfast.objectives.entropy import acting_entropy_coefficient, next_entropy_coefficient
from holdfast.objectives.kl import next_kl_coefficient
from holdfast.objectives.policy import PolicyGradient
from holdfast.training.policy.run import PolicyRun


def controlled_objective(run: PolicyRun) -> Objective:
    """Return the objective with the coefficients of the present step."""
    objective, controllers, config = run.evaluation.objective, run.trained.state.controllers, run.config
    if not isinstance(objective, PolicyGradient) or not controllers:
        return objective
    # What has no target (any more) is the configuration's, whatever a checkpoint remembers.
    kl = config.kl.coefficient if config.kl.target is None else controllers["kl"]
    entropy = config.entropy.coefficient
    if config.entropy.target is not None:
        entropy = acting_entropy_coefficient(
            config.entropy, controllers["entropy"], controllers.get("measured_entropy")
        )
    return objective.with_coefficients(kl, entropy)


def measured(run: PolicyRun, metrics: Mapping[str, float]) -> dict[str, float]:
    """Move the coefficients by what the step measured, and return those that will act in the next one."""
    config, state = run.config, run.trained.state
    if config.kl.target is None and config.entropy.target is None:
        return {}
    before = state.controllers or {"kl": config.kl.coefficient, "entropy": config.entropy.coefficient}
    completions = config.data.batch_size * config.rollout.group_size
    entropy = metrics.get("entropy", math.nan)
    state.controllers = {
        "kl": next_kl_coefficient(config.kl, before["kl"], metrics.get("kl", math.nan), completions),
        "entropy": next_entropy_coefficient(config.entropy, before["entropy"], entropy),
    }
    if not math.isnan(entropy):
        state.controllers["measured_entropy"] = entropy
    return {"kl/coefficient": state.controllers["kl"], "entropy/coefficient": state.controllers["entropy"]}
