"""`holdfast model check`: what a run would find of a model before step 1, without a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from holdfast.config.load import from_mapping
from holdfast.config.paths import expanded
from holdfast.config.runs import SFTConfig, TrainingConfig
from holdfast.config.verbs import load_run
from holdfast.errors import ConfigError

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check(target: str, overrides: Sequence[str]) -> int:
    """Print what is found; return 0 if the model is not refused, else 1.

    Raises:
        ConfigError: The target is none of what is taken.
        ModelError: It has no configuration that can be read.
    """
    from holdfast.config.launch import LaunchConfig
    from holdfast.parallel.mesh import joined
    from holdfast.training.suitability import examine

    config, base, asked = _run_of(target, overrides)
    with joined(LaunchConfig(ranks=1, device="cpu")) as world:
        report = examine(config, base, world, asked=asked)
    for line in report.lines:
        print(line)
    return 1 if report.refused else 0


def _run_of(target: str, overrides: Sequence[str]) -> tuple[TrainingConfig, Path, bool]:
    """Return a run with the model, the directory of its file, and whether somebody wrote that run."""
    path = expanded(target)
    if path.suffix in {".yaml", ".yml"}:
        loaded = load_run(path, overrides)
        return loaded.config, loaded.base, True
    if path.name == "config.json" and path.is_file():
        target = str(path.parent)
    elif not path.is_dir() and (path.exists() or not _HUB_NAME.fullmatch(target)):
        raise ConfigError(
            f"{target} is none of what can be checked: a model's directory or its config.json, a name on the hub "
            "(owner/name), or a run's file (RUN.yaml)."
        )
    values = {"steps": 1, "model": {"path": target}, "data": {"path": "rows", "batch_size": 1}}
    return from_mapping(values, SFTConfig, "model check", overrides), Path.cwd(), False
