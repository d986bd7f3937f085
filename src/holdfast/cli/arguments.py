"""Arguments that several commands take; an argument of a path lists the kinds of paths that it takes."""

# As `main`, without `from __future__ import annotations`.
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.config.path_kinds import KEYS, MODEL_PATH, PathKind, misplaced
from holdfast.errors import UserError

if TYPE_CHECKING:
    from torch import dtype as TorchDtype


def takes(*kinds: PathKind) -> Callable[[typer.Context, Any], Any]:
    """Return the callback of an argument that takes these kinds of paths, the usual one first."""

    def check(context: typer.Context, value: Any) -> Any:
        for path in value if isinstance(value, list | tuple) else [value]:
            refusal = None if path is None else misplaced(str(path), kinds, f"`{_command(context)}`")
            if refusal is not None:
                raise UserError(refusal)
        return value

    return check


def _command(context: Any) -> str:
    """Return the words of a command; those of the process may begin with a path to the program."""
    below = "" if context.parent is None else _command(context.parent)
    return f"{below} {context.info_name}" if below else "holdfast"


IS_MODEL, IS_ROWS, IS_RUN = takes(*MODEL_PATH), takes(*KEYS["data.path"]), takes(PathKind.RUN)
Model = Annotated[
    str | None,
    typer.Option(
        "--model", help="With --data, instead of a file: what `holdfast init` would write.", callback=IS_MODEL
    ),
]
Rows = Annotated[
    str | None, typer.Option("--data", help="Rows: a file, a directory, or a name on the hub.", callback=IS_ROWS)
]
Teacher = Annotated[str | None, typer.Option("--teacher", help="The model that a distillation learns from.")]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that lies in the checkpoint, if its model needs it."),
]

_RUN_FILE = typer.Argument(
    metavar="RUN.yaml", help="The run's configuration.", show_default=False, callback=takes(PathKind.RUN_FILE)
)
RunFile = Annotated[Path, _RUN_FILE]
OptionalRunFile = Annotated[Path | None, _RUN_FILE]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MORE.yaml|a.b=value ...]", help="Files and values that replace the file's."),
]
RunDirectory = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="A run, whether it goes on or has ended.", callback=IS_RUN)
]
RecordedRun = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="A run with rollout.record: true.", callback=IS_RUN)
]
EvaluationTarget = Annotated[
    str,
    typer.Argument(
        metavar="RUN.yaml|MODEL",
        help="A run's file, an exported model, or with --data any model.",
        callback=takes(PathKind.EXPORT, PathKind.RUN_FILE, PathKind.MODEL),
    ),
]
GenerationTargets = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL|CHECKPOINT|RUN...",
        help="Of a run: its newest checkpoint. Several: side by side.",
        callback=takes(PathKind.EXPORT, PathKind.RUN, PathKind.CHECKPOINT, PathKind.CHECKPOINTS, PathKind.MODEL),
    ),
]
ModelTarget = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|RUN.yaml",
        help="A directory, a config.json, a hub name, or a run's file.",
        callback=takes(*MODEL_PATH, PathKind.RUN_FILE),
    ),
]
ForeignFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="YAML or JSON that another system reads.", callback=takes(PathKind.FOREIGN_CONFIG)
    ),
]
Configuration = Annotated[
    Path,
    typer.Argument(help="A YAML file, or the directory of a run.", callback=takes(PathKind.RUN_FILE, PathKind.RUN)),
]


class Dtype(StrEnum):
    """Dtype of exported floating-point tensors."""

    same = "same"
    float32 = "float32"
    bfloat16 = "bfloat16"


def torch_dtype(choice: Dtype) -> "TorchDtype | None":
    """Return torch's own; None for tensors that stay as they are."""
    import torch

    return None if choice is Dtype.same else getattr(torch, choice.value)
