"""Evaluate a model alone: the numbers an evaluation during training would give."""

from __future__ import annotations

from pathlib import Path

from holdfast.config.distill import DistillConfig
from holdfast.config.dpo import DPOConfig
from holdfast.config.grpo import GRPOConfig
from holdfast.config.runs import SFTConfig, TrainingConfig
from holdfast.errors import ConfigError
from holdfast.parallel.mesh import World
from holdfast.training.build import build_evaluation
from holdfast.training.build_distillation import build_distillation_evaluation
from holdfast.training.build_policy import build_policy_evaluation
from holdfast.training.build_preference import build_preference_evaluation
from holdfast.training.directory import run_directory
from holdfast.training.distillation import evaluate_distilled
from holdfast.training.evaluate import evaluate
from holdfast.training.evaluate_policy import evaluate_policy
from holdfast.training.preference import evaluate_preferences
from holdfast.training.rewards import open_rewards


def evaluate_run(config: TrainingConfig, base: Path, world: World) -> dict[str, float]:
    """Print and return eval/<set>/<metric>; completions go to the run directory if they are configured.

    Raises:
        ConfigError: No evaluation set is named.
    """
    if not config.evaluation.sets and config.data.validation_split == 0:
        raise ConfigError("There is nothing to evaluate on: set evaluation.sets or data.validation_split.")
    match config:
        case GRPOConfig():
            with open_rewards(config, base, world) as score:
                policy = build_policy_evaluation(config, base, world, score)
                metrics = evaluate_policy(policy, "eval")
        case DPOConfig():
            metrics = evaluate_preferences(build_preference_evaluation(config, base, world), "eval")
        case DistillConfig():
            metrics = evaluate_distilled(build_distillation_evaluation(config, base, world), "eval")
        case SFTConfig():
            metrics = evaluate(build_evaluation(config, base, world), "eval")
        case _:
            raise AssertionError(type(config))
    if world.is_first:
        for name, value in metrics.items():
            print(f"{name} {value:.6g}", flush=True)
        if config.evaluation.completions is not None or isinstance(config, GRPOConfig):
            print(f"completions are in {run_directory(config) / 'completions'}", flush=True)
    return metrics
