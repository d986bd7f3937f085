"""Controllers of the KL and entropy coefficients, which follow a target from step to step."""

from __future__ import annotations

import math
from collections.abc import Mapping

from holdfast.objectives.base import Objective
from holdfast.objectives.policy import PolicyGradient
from holdfast.objectives.regularisers import acting_entropy_coefficient, next_entropy_coefficient, next_kl_coefficient
from holdfast.training.policy.run import PolicyTraining


def controlled_objective(training: PolicyTraining) -> Objective:
    """Return the objective with the coefficients of the present step."""
    objective, controllers, config = (
        training.evaluation.objective,
        training.model.state.controllers,
        training.config,
    )
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


def move_coefficients(training: PolicyTraining, metrics: Mapping[str, float]) -> dict[str, float]:
    """Move the coefficients by the metrics of the step, and return the coefficients of the next one."""
    config, state = training.config, training.model.state
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
