"""`holdfast sft | dpo | reward | grpo | distill`: the commands that train."""

# As cli/main.py, without `from __future__ import annotations`.
from collections.abc import Sequence
from pathlib import Path

import typer

from holdfast.cli.arguments import Model, OptionalRunFile, Overrides, Rows, Teacher
from holdfast.config.load import LoadedConfig, from_mapping, load_config
from holdfast.config.verbs.distill import DistillConfig
from holdfast.config.verbs.roots import ROOTS, verb_of_file
from holdfast.config.verbs.training import SFTConfig, TrainingConfig
from holdfast.errors import ConfigError
from holdfast.launch.start import start


def sft(run: OptionalRunFile = None, overrides: Overrides = None, model: Model = None, data: Rows = None) -> None:
    """Supervised fine-tuning."""
    raise typer.Exit(train_run("sft", run, overrides or [], model, data))


def dpo(run: OptionalRunFile = None, overrides: Overrides = None, model: Model = None, data: Rows = None) -> None:
    """Training on preferences between answers: DPO and its kin."""
    raise typer.Exit(train_run("dpo", run, overrides or [], model, data))


def reward(run: OptionalRunFile = None, overrides: Overrides = None, model: Model = None, data: Rows = None) -> None:
    """Training of a reward model on preferences between answers."""
    raise typer.Exit(train_run("reward", run, overrides or [], model, data))


def grpo(run: OptionalRunFile = None, overrides: Overrides = None, model: Model = None, data: Rows = None) -> None:
    """Reinforcement learning from rewards of sampled completions: GRPO and its kin."""
    raise typer.Exit(train_run("grpo", run, overrides or [], model, data))


def distill(
    run: OptionalRunFile = None,
    overrides: Overrides = None,
    model: Model = None,
    data: Rows = None,
    teacher: Teacher = None,
) -> None:
    """Distillation of a teacher into a student, on rows or on what the student writes."""
    raise typer.Exit(train_run("distill", run, overrides or [], model, data, teacher))


def train_run(  # noqa: PLR0913, PLR0917 - each is an option of a command
    verb: str,
    path: Path | None,
    overrides: Sequence[str],
    model: str | None = None,
    data: str | None = None,
    teacher: str | None = None,
) -> int:
    """Run a verb, on a file or on what `holdfast init` would write for a model and rows; return its exit code.

    Raises:
        ConfigError: There is neither, or both.
    """
    if path is not None and not any((model, data, teacher)):
        return start(verb, _load(verb, path, overrides))
    # Without a file the first override stands in its place.
    values = [*([] if path is None else [str(path)]), *overrides]
    is_taught = verb == DistillConfig.verb
    needed = [model, data, *([teacher] if is_taught else [])]
    if model is None or data is None or None in needed or any("=" not in value for value in values):
        learns_from = " --teacher TEACHER" if is_taught else ""
        raise ConfigError(
            f"`holdfast {verb}` takes a file, `holdfast {verb} RUN.yaml`, or a model and rows instead of one: "
            f"`holdfast {verb} --model MODEL{learns_from} --data ROWS.jsonl steps=100`."
        )
    from holdfast.cli.commands.init.first_file import suggest

    tree = suggest(verb, (model, teacher), data, Path.cwd(), verb).tree
    return start(verb, LoadedConfig(from_mapping(tree, ROOTS[verb], "the suggestion", values), Path.cwd()))


def _load(verb: str, path: Path, overrides: Sequence[str]) -> LoadedConfig[TrainingConfig]:
    """Read a verb's file; where it is wrong for this verb and has a section of another one alone, say so first.

    Raises:
        ConfigError: As `load`.
    """
    try:
        return load_config(path, overrides, ROOTS[verb])
    except ConfigError as error:
        try:
            meant = verb_of_file(path, overrides)
        except ConfigError:
            raise error from None
        if meant in {verb, SFTConfig.verb}:  # a file of supervised training has no section of its own
            raise
        options = "".join(f" {override}" for override in overrides)
        raise ConfigError(
            f"{path}{options} looks like a run of `holdfast {meant}`: try `holdfast {meant} {path}{options}`. For "
            f"`holdfast {verb}`:\n{error}"
        ) from None
