"""Evaluate a model alone: the numbers an evaluation during training would give."""

from __future__ import annotations

from pathlib import Path

from holdfast.config.runs import SFTConfig
from holdfast.errors import ConfigError
from holdfast.parallel.mesh import World
from holdfast.training import directory
from holdfast.training.build import build_run
from holdfast.training.fit import evaluate


def evaluate_run(config: SFTConfig, base: Path, world: World) -> dict[str, float]:
    """Print and return eval/<set>/<metric>; completions go to the run directory if they are configured.

    Raises:
        ConfigError: No evaluation set is named.
    """
    if not config.evaluation.sets and config.data.validation_split == 0:
        raise ConfigError("There is nothing to evaluate on: set evaluation.sets or data.validation_split.")
    run = build_run(config, base, world)
    if world.is_first:
        directory.create(run.directory, config, "eval")
    metrics = evaluate(run)
    if world.is_first:
        for name, value in metrics.items():
            print(f"{name} {value:.6g}", flush=True)
        if config.evaluation.completions is not None:
            print(f"completions are in {run.directory / 'completions'}", flush=True)
    return metrics
