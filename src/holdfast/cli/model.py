"""`holdfast model check`: what a run would find of a model before step 1, without a run."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from holdfast.config.load import from_mapping
from holdfast.config.verbs.roots import load_run
from holdfast.config.verbs.training import SFTConfig, TrainingConfig
from holdfast.errors import ConfigError
from holdfast.escaping import escaped_paragraph
from holdfast.files import expanded

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check(target: str, overrides: Sequence[str]) -> int:
    """Print what is found; return 0 if the model is not refused, else 1.

    Raises:
        ConfigError: The target is none of what is taken.
        ModelError: The target has no configuration that can be read.
    """
    from holdfast.config.sections.launch import LaunchConfig
    from holdfast.parallel.mesh import joined_world
    from holdfast.training.build.suitability import examine

    config, base, asked = _run_of(target, overrides)
    _say(f"looking at {target}, which may take half a minute")
    with joined_world(LaunchConfig(ranks=1, device="cpu")) as world, _without_warnings():
        accepted = examine(config, base, world, asked=asked, say=_say)
    return 0 if accepted else 1


def _say(line: str) -> None:
    print(escaped_paragraph(line), flush=True)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Leave out what transformers warns of: what matters of it is in our own lines."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


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
