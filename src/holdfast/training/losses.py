"""From the `objective` section, and what stands beside it, to a loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.config.algorithm import DFTConfig, NLLConfig, SupervisedObjective, UserObjectiveConfig
from holdfast.config.grpo import GRPOConfig
from holdfast.errors import ConfigError
from holdfast.objectives.base import Objective
from holdfast.objectives.policy import build_policy_objective
from holdfast.objectives.supervised import DynamicFineTuning, NegativeLogLikelihood
from holdfast.training.observe import load_function


def supervised_objective(section: SupervisedObjective, base: Path) -> Objective:
    """Return the loss of a supervised run.

    Raises:
        ConfigError: The user's own cannot be made, or is no loss.
    """
    match section:
        case NLLConfig():
            return NegativeLogLikelihood()
        case DFTConfig():
            return DynamicFineTuning()
        case _:
            return _users_objective(section, base)


def policy_objective(config: GRPOConfig, base: Path) -> Objective:
    """Return the loss of a policy's run.

    Raises:
        ConfigError: As `supervised_objective`.
    """
    if isinstance(config.objective, UserObjectiveConfig):
        return _users_objective(config.objective, base)
    return build_policy_objective(
        config.objective, config.kl, config.entropy, config.correction, config.off_policy_mask
    )


def _users_objective(section: UserObjectiveConfig, base: Path) -> Objective:
    made = _made_by_user(load_function(section.path, base, "objective.path"), section)
    missing = [name for name in ("separable", "needs_entropy", "token_terms", "sums") if not hasattr(made, name)]
    if missing:
        raise ConfigError(
            f"objective.path {section.path} must return an object with separable, needs_entropy, token_terms "
            f"and sums (holdfast.objectives.base.Objective); {', '.join(missing)} is missing."
        )
    return made  # type: ignore[no-any-return]  # checked above


def _made_by_user(function: Callable[..., Any], section: UserObjectiveConfig) -> Any:
    try:
        return function(**section.kwargs)
    except Exception as error:  # the user's own code may raise anything
        given = ", ".join(f"{name}={value!r}" for name, value in section.kwargs.items()) or "no arguments"
        raise ConfigError(
            f"objective.path {section.path} called with {given} raises {type(error).__name__}: {error}. Mend the "
            "function or objective.kwargs."
        ) from error
