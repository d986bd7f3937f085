"""`holdfast model`: shows what Holdfast knows of a model."""

# As cli/main.py, without `from __future__ import annotations`.
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from holdfast.cli.arguments import ModelTarget, Overrides, RunFile
from holdfast.config.load import from_mapping
from holdfast.config.verbs.roots import load_run
from holdfast.config.verbs.training import SFTConfig, TrainingConfig
from holdfast.errors import ConfigError
from holdfast.files import expanded
from holdfast.text.escaping import escaped_paragraph


def model_parameters(run: RunFile, overrides: Overrides = None) -> None:
    """Print every parameter's name, shape, and whether it is trained."""
    for line in parameters(run, overrides or []):
        typer.echo(line)


def model_check(
    target: ModelTarget,
    overrides: Overrides = None,
) -> None:
    """Look at a model as a run does before step 1, large ones on a small configuration; exit 1 if it is refused."""
    raise typer.Exit(check(target, overrides or []))


def parameters(path: Path, overrides: Sequence[str]) -> Iterator[str]:
    """Yield one line per parameter."""
    from holdfast.models.names import named_parameters
    from holdfast.models.setup.model import blueprint

    loaded = load_run(path, overrides)
    config = loaded.config
    origin = blueprint(config.model, loaded.base, seed=config.seed, scorer=config.scores)
    for name, parameter in named_parameters(origin.model).items():
        shape = "x".join(str(size) for size in parameter.shape) or "scalar"
        state = "trained" if parameter.requires_grad else "frozen"
        yield f"{name}  {shape}  {state}"


_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check(target: str, overrides: Sequence[str]) -> int:
    """Print what is found; return 0 if the model is not refused, else 1.

    Raises:
        ConfigError: The target is none of what is taken.
        ModelError: The target has no configuration that can be read.
    """
    from holdfast.config.sections.launch import LaunchConfig
    from holdfast.parallel.mesh import joined_world
    from holdfast.training.setup.suitability import check_suitability

    config, base, is_asked = _run_of(target, overrides)
    _say(f"looking at {target}, which may take half a minute")
    with joined_world(LaunchConfig(ranks=1, device="cpu")) as world, _without_warnings():
        accepted = check_suitability(config, base, world, has_config=is_asked, say=_say)
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
