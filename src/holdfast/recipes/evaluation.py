"""Evaluate a model alone: the numbers an evaluation during training would give."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.config.verbs.distill import DistillConfig
from holdfast.config.verbs.dpo import DPOConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import SFTConfig, TrainingConfig
from holdfast.errors import ConfigError
from holdfast.models.files.origin import locate
from holdfast.parallel.mesh import World
from holdfast.text.escaping import escaped_paragraph
from holdfast.training.directory import COMPLETIONS, run_directory
from holdfast.training.distillation.build import build_distillation_evaluation
from holdfast.training.distillation.run import evaluate_distilled
from holdfast.training.evaluate import evaluate
from holdfast.training.policy.build import build_policy_evaluation
from holdfast.training.policy.episodes import open_environments
from holdfast.training.policy.evaluate import evaluate_policy
from holdfast.training.policy.reward_columns import check_answers, check_columns, check_returns
from holdfast.training.policy.rewards import open_rewards
from holdfast.training.preference.build import build_preference_evaluation
from holdfast.training.preference.run import evaluate_preferences
from holdfast.training.run import Run
from holdfast.training.saving.parents import evaluated_model, notes_of_exports
from holdfast.training.setup.begin import build_evaluation

NUMBERS = "metrics.json"


def evaluate_run(config: TrainingConfig, base: Path, world: World) -> dict[str, float]:
    """Print and return eval/<set>/<metric>, and leave them in the run directory with completions if there are some.

    Every evaluated model and step has a directory of its own there.

    Raises:
        ConfigError: No evaluation set is named.
    """
    if not config.evaluation.sets and config.data.validation_split == 0:
        raise ConfigError("There is nothing to evaluate on: set evaluation.sets or data.validation_split.")
    folder, about = _check_weights(Run.of(config, base, world))
    model = config.model.model_copy(update={"check_gradients": False})  # nothing is trained
    metrics, messages = _measured(config.model_copy(update={"model": model}), base, world, f"{folder}/eval")
    if world.is_first:
        for text in messages:
            print(escaped_paragraph(text), flush=True)
        for name, value in metrics.items():
            print(escaped_paragraph(f"{name} {value:.6g}"), flush=True)
        has_completions = config.evaluation.completions is not None or isinstance(config, GRPOConfig)
        output = run_directory(config) / COMPLETIONS / folder
        print(_keep_numbers(output, about, metrics, "numbers and completions" if has_completions else "numbers"))
    return metrics


def _keep_numbers(folder: Path, about: Mapping[str, Any], metrics: Mapping[str, float], subject: str) -> str:
    """Write the numbers, with null for what is not finite; return what there is to say of it."""
    values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    text = json.dumps({**about, "time": time.time(), "metrics": values}, indent=2) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{NUMBERS}.{os.getpid()}"
        temporary.write_text(text)
        temporary.replace(folder / NUMBERS)
    except OSError as error:  # they stand on the screen, and no other model's are in their place
        return f"warning: the numbers could not be written: {error}"
    return f"{subject} are in {folder}"


def _measured(config: TrainingConfig, base: Path, world: World, label: str) -> tuple[dict[str, float], list[str]]:
    """Return the numbers, and what there is to say about them."""
    match config:
        case GRPOConfig():
            with (
                open_rewards(config, base, world) as rewards,
                open_environments(config, base, world) as environments,
            ):
                policy = build_policy_evaluation(config, base, world, rewards.score, rewards.columns, environments)
                check_columns(policy, rewards.columns)
                check_answers(policy, rewards.answers, rewards.unreadable)
                check_returns(policy, rewards.try_out)
                return evaluate_policy(policy, label), policy.run.log.messages
        case DPOConfig():
            return evaluate_preferences(build_preference_evaluation(config, base, world), label), []
        case DistillConfig():
            return evaluate_distilled(build_distillation_evaluation(config, base, world), label), []
        case SFTConfig():
            return evaluate(build_evaluation(config, base, world), label), []
        case _:
            raise AssertionError(type(config))


def _check_weights(run: Run) -> tuple[str, dict[str, Any]]:
    """Compare every byte of an export with what it says of itself; all ranks call this together.

    Returns:
        On the first rank, the name of what is evaluated and what it is.

    Raises:
        ModelError: The weights are others.
    """
    path, ranks = run.config.model.path, run.ranks
    about: tuple[str, dict[str, Any]] = "", {}
    with ranks.together():
        if ranks.rank == 0:
            model_path = None if path is None else locate(path, run.config.model, run.base, weights=True)
            notes_of_exports(run, model_path, whole=True)
            about = evaluated_model(run, model_path)
    ranks.close()
    return about


def scored_nothing(config: TrainingConfig, metrics: Mapping[str, float]) -> bool:
    """Return whether completions should have been scored and none was."""
    return isinstance(config, GRPOConfig) and not any(name.endswith("/accuracy") for name in metrics)
