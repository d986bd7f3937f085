"""Evaluate a model alone: the numbers an evaluation during training would give."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from holdfast.config.verbs.distill import DistillConfig
from holdfast.config.verbs.dpo import DPOConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import SFTConfig, TrainingConfig
from holdfast.errors import ConfigError
from holdfast.escaping import escaped_paragraph
from holdfast.models.source.origin import locate
from holdfast.parallel.mesh import World
from holdfast.training.build.begin import build_evaluation
from holdfast.training.directory import run_directory
from holdfast.training.distillation.build import build_distillation_evaluation
from holdfast.training.distillation.run import evaluate_distilled
from holdfast.training.evaluate import evaluate
from holdfast.training.policy.build import build_policy_evaluation
from holdfast.training.policy.evaluate import evaluate_policy
from holdfast.training.policy.reward_columns import check_answers, check_columns
from holdfast.training.policy.rewards import open_rewards
from holdfast.training.preference.build import build_preference_evaluation
from holdfast.training.preference.run import evaluate_preferences
from holdfast.training.run import Setting
from holdfast.training.saving.parents import notes_of_exports


def evaluate_run(config: TrainingConfig, base: Path, world: World) -> dict[str, float]:
    """Print and return eval/<set>/<metric>; completions go to the run directory if they are configured.

    Raises:
        ConfigError: No evaluation set is named.
    """
    if not config.evaluation.sets and config.data.validation_split == 0:
        raise ConfigError("There is nothing to evaluate on: set evaluation.sets or data.validation_split.")
    _check_weights(Setting.of(config, base, world))
    model = config.model.model_copy(update={"check_gradients": False})  # nothing is trained
    metrics, messages = _measured(config.model_copy(update={"model": model}), base, world)
    if world.is_first:
        for text in messages:
            print(escaped_paragraph(text), flush=True)
        for name, value in metrics.items():
            print(escaped_paragraph(f"{name} {value:.6g}"), flush=True)
        if config.evaluation.completions is not None or isinstance(config, GRPOConfig):
            print(f"completions are in {run_directory(config) / 'completions'}", flush=True)
    return metrics


def _measured(config: TrainingConfig, base: Path, world: World) -> tuple[dict[str, float], list[str]]:
    """Return the numbers, and what there is to say about them."""
    match config:
        case GRPOConfig():
            with open_rewards(config, base, world) as rewards:
                policy = build_policy_evaluation(config, base, world, rewards.score, rewards.columns)
                check_columns(policy, rewards.columns)
                check_answers(policy, rewards.answers, rewards.unreadable)
                return evaluate_policy(policy, "eval"), policy.setting.log.messages
        case DPOConfig():
            return evaluate_preferences(build_preference_evaluation(config, base, world), "eval"), []
        case DistillConfig():
            return evaluate_distilled(build_distillation_evaluation(config, base, world), "eval"), []
        case SFTConfig():
            return evaluate(build_evaluation(config, base, world), "eval"), []
        case _:
            raise AssertionError(type(config))


def _check_weights(setting: Setting) -> None:
    """Compare every byte of an export with what it says of itself; all ranks call this together.

    Raises:
        ModelError: The weights are others.
    """
    path, ranks = setting.config.model.path, setting.ranks
    with ranks.together():
        if path is not None and ranks.rank == 0:
            place = locate(path, setting.config.model, setting.base, weights=True)
            notes_of_exports(setting, place, whole=True)
    ranks.close()


def scored_nothing(config: TrainingConfig, metrics: Mapping[str, float]) -> bool:
    """Say whether completions were to be scored, and not one of them was."""
    return isinstance(config, GRPOConfig) and not any(name.endswith("/accuracy") for name in metrics)
