"""Build the loss of a run from the section `objective` and related sections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from holdfast.config.public import argument_words
from holdfast.config.sections.algorithm import (
    DFTConfig,
    NLLConfig,
    SupervisedObjective,
    UserObjectiveConfig,
)
from holdfast.config.sections.preference import (
    KTOLossConfig,
    PreferenceConfig,
    PreferenceLoss,
    UserLossConfig,
)
from holdfast.config.verbs.dpo import ScorerPreferenceConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import ConfigError
from holdfast.objectives.base import Objective
from holdfast.objectives.pairs import BradleyTerry, PairLoss, pair_loss_of
from holdfast.objectives.policy import build_policy_objective
from holdfast.objectives.preference import KTO, PairedPreference, PairedScores, WeightedLoss
from holdfast.objectives.supervised import DynamicFineTuning, NegativeLogLikelihood
from holdfast.text.escaping import error_words
from holdfast.training.observe import load_function
from holdfast.training.run import ConfiguredRun


def supervised_objective(section: SupervisedObjective, setting: ConfiguredRun) -> Objective:
    """Return the loss of a supervised run.

    Raises:
        ConfigError: The user's own cannot be made, or is no loss.
    """
    match section:
        case NLLConfig():
            return NegativeLogLikelihood(label_smoothing=section.label_smoothing)
        case DFTConfig():
            return DynamicFineTuning()
        case _:
            return _user_objective(section, setting)


def policy_objective(config: GRPOConfig, setting: ConfiguredRun) -> Objective:
    """Return the loss of a policy's run.

    Raises:
        ConfigError: As `supervised_objective`.
    """
    if isinstance(config.objective, UserObjectiveConfig):
        return _user_objective(config.objective, setting)
    objective = build_policy_objective(
        config.objective, config.kl, config.entropy, config.correction, config.off_policy_mask
    )
    return objective if config.critic is None else replace(objective, shapes_advantages=False)


def preference_objective(section: PreferenceConfig, setting: ConfiguredRun) -> Objective:
    """Return the loss of a run on preferences.

    Raises:
        ConfigError: As `supervised_objective`.
    """
    if isinstance(section, ScorerPreferenceConfig):
        (only,) = section.loss
        loss = WeightedLoss(only.kind, only.weight, BradleyTerry(only.center))
        return PairedScores([loss], needs_reference=False)
    first = section.loss[0]
    if isinstance(first, KTOLossConfig):
        weights = (first.weight * first.desirable_weight, first.weight * first.undesirable_weight)
        return KTO(first.beta, *weights, sft=section.sft)
    losses = [
        WeightedLoss(name, loss.weight, _pair_loss(loss, setting))
        for name, loss in zip(section.kinds, section.loss, strict=True)
    ]
    return PairedPreference(losses, section.sft, section.needs_reference)


def _pair_loss(section: PreferenceLoss, setting: ConfiguredRun) -> PairLoss:
    match section:
        case UserLossConfig():
            loss = _made_by_user(
                load_function(section.path, setting.base, "preference.loss.path"), section, "preference.loss"
            )
            missing = [name for name in ("losses", "rewards") if not callable(getattr(loss, name, None))]
            if missing:
                raise ConfigError(
                    f"preference.loss.path {section.path} must return an object with losses and rewards "
                    f"(holdfast.objectives.pairs.PairLoss); {', '.join(missing)} is missing."
                )
            return loss  # type: ignore[no-any-return]  # checked above
        case KTOLossConfig():
            raise AssertionError("the section refuses kto beside losses of pairs")
        case _:
            return pair_loss_of(section)


def _user_objective(section: UserObjectiveConfig, setting: ConfiguredRun) -> Objective:
    objective = _made_by_user(load_function(section.path, setting.base, "objective.path"), section, "objective")
    missing = [name for name in ("separable", "needs_entropy", "token_terms", "sums") if not hasattr(objective, name)]
    if missing:
        raise ConfigError(
            f"objective.path {section.path} must return an object with separable, needs_entropy, token_terms "
            f"and sums (holdfast.objectives.base.Objective); {', '.join(missing)} is missing."
        )
    return objective  # type: ignore[no-any-return]  # checked above


def _made_by_user(function: Callable[..., Any], section: UserObjectiveConfig | UserLossConfig, key: str) -> Any:
    try:
        return function(**section.kwargs)
    except Exception as error:  # the user's own code may raise anything
        arguments = argument_words(section.kwargs) or "no arguments"
        raise ConfigError(
            f"{key}.path {section.path} called with {arguments} raises {error_words(error)}. Mend the "
            f"function or {key}.kwargs."
        ) from error
