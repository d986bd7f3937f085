"""`holdfast eval`: a model on rows."""

# As cli/main.py, without `from __future__ import annotations`.
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.arguments import EvaluationTarget, Overrides
from holdfast.config.load import EXPORTED_CONFIG, LoadedConfig, from_mapping
from holdfast.config.verbs.roots import ROOTS, load_run
from holdfast.config.verbs.training import TrainingConfig
from holdfast.errors import ConfigError
from holdfast.launch.start import start
from holdfast.models.files.places import local_directory


def evaluate(
    target: EvaluationTarget,
    overrides: Overrides = None,
    data: Annotated[
        str | None, typer.Option("--data", help="Rows to evaluate a model on: a file, a directory, a name on the hub.")
    ] = None,
) -> None:
    """Evaluate a model on the run's evaluation sets or on rows, and write its completions."""
    raise typer.Exit(evaluate_model(target, overrides or [], data))


def evaluate_model(target: str, overrides: Sequence[str], data: str | None = None) -> int:
    """Evaluate by a run's file, or an export by what its run said, or any model on rows; return the exit code.

    Raises:
        ConfigError: A model is no export, and no rows are named; or rows are named beside a file that names some.
    """
    path = Path(target)
    if data is not None:
        if path.is_file():
            raise ConfigError(
                f"{target} is a file, which names its evaluation sets itself. Give a model's directory or hub name "
                f"with --data, or leave --data out."
            )
        return start("eval", LoadedConfig(_on_rows(target, data, overrides), Path.cwd()))
    if not path.exists() and path.suffix not in {".yaml", ".yml", ".json"}:
        local_directory(target, Path.cwd())  # says whose export it would be
    if not path.is_dir():
        return start("eval", load_run(path, overrides))
    file = path / EXPORTED_CONFIG
    if not file.exists():
        raise ConfigError(
            f"{target} has no {EXPORTED_CONFIG}, so it is no export of Holdfast and names no rows. Evaluate it with "
            f"rows, `holdfast eval {target} --data ROWS.jsonl`, or with a run's file, `holdfast eval RUN.yaml "
            f"model.path={target}`."
        )
    here = [
        f"model.path={path.resolve()}",
        "model.config=null",
        "model.tokenizer=null",
        "model.image_processor=null",
        "model.freeze=[]",
        "model.lora=null",
        "model.trust_remote_code=false",  # whoever wrote the export has no say in that
    ]
    return start("eval", load_run(file, [*here, *overrides]))


def _on_rows(model: str, data: str, overrides: Sequence[str]) -> TrainingConfig:
    """Return what `holdfast init` would write for a model and rows, with all rows as the evaluation set."""
    from holdfast.cli.commands.init.first_file import suggest

    draft = suggest(None, (model, None), data, Path.cwd(), "eval")
    tree, section = draft.tree, draft.tree["data"]
    section.pop("validation_split", None)
    tree["model"].pop("lora", None)  # nothing is trained
    columns = {name: section[name] for name in ("path", "columns") if name in section}
    tree["evaluation"] = {"sets": {"rows": columns}}
    return from_mapping(tree, ROOTS[draft.verb], "the suggestion", overrides)
