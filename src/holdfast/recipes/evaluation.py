"""Evaluate a model alone: the numbers an evaluation during training would give."""

from __future__ import annotations

from pathlib import Path

from holdfast.config.runs import SFTConfig
from holdfast.errors import ConfigError
from holdfast.parallel.mesh import World
from holdfast.training.build import build_evaluation
from holdfast.training.evaluate import evaluate


def evaluate_run(config: SFTConfig, base: Path, world: World) -> dict[str, float]:
    """Print and return eval/<set>/<metric>; completions go to the run directory if they are configured.

    Raises:
        ConfigError: No evaluation set is named.
    """
    if not config.evaluation.sets and config.data.validation_split == 0:
        raise ConfigError("There is nothing to evaluate on: set evaluation.sets or data.validation_split.")
    model = build_evaluation(config, base, world)
    metrics = evaluate(model, "eval")
    if world.is_first:
        for name, value in metrics.items():
            print(f"{name} {value:.6g}", flush=True)
        if config.evaluation.completions is not None:
            print(f"completions are in {model.directory / 'completions'}", flush=True)
    return metrics
