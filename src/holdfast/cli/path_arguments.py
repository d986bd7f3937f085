"""Arguments that are paths: each says which kinds of paths its command takes."""

# As `main`, without `from __future__ import annotations`.
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.config.path_kinds import PathKind
from holdfast.config.path_uses import KEYS, MODEL_PATH, check_path


def takes(*kinds: PathKind) -> Callable[[typer.Context, Any], Any]:
    """Return the callback of an argument that takes these kinds of paths, the usual one first."""

    def check(context: typer.Context, value: Any) -> Any:
        for path in value if isinstance(value, list | tuple) else [value]:
            if path is not None:
                check_path(str(path), kinds, f"`{_command(context)}`")
        return value

    return check


def _command(context: Any) -> str:
    names = []
    while context.parent is not None:
        names.append(context.info_name)
        context = context.parent
    return " ".join(["holdfast", *reversed(names)])


IS_MODEL, IS_ROWS = takes(*KEYS["model.path"]), takes(*KEYS["data.path"])
Model = Annotated[
    str | None,
    typer.Option(
        "--model", help="With --data, instead of a file: what `holdfast init` would write.", callback=IS_MODEL
    ),
]
Rows = Annotated[
    str | None, typer.Option("--data", help="Rows: a file, a directory, or a name on the hub.", callback=IS_ROWS)
]
RecordedRun = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="A run with rollout.record: true.", callback=takes(PathKind.RUN))
]
EvaluationTarget = Annotated[
    Path,
    typer.Argument(
        metavar="RUN.yaml|EXPORT",
        help="A run's file, or an exported model.",
        callback=takes(PathKind.EXPORT, PathKind.RUN_FILE, *MODEL_PATH),
    ),
]
GenerationTarget = Annotated[
    str,
    typer.Argument(
        metavar="EXPORT|CHECKPOINT|RUN",
        help="Of a run: its newest checkpoint.",
        callback=takes(PathKind.EXPORT, PathKind.RUN, PathKind.CHECKPOINT, PathKind.CHECKPOINTS, *MODEL_PATH),
    ),
]
ModelTarget = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|RUN.yaml",
        help="A directory, a config.json, a hub name, or a run's file.",
        callback=takes(*MODEL_PATH, PathKind.MODEL_CONFIG, PathKind.RUN_FILE),
    ),
]
ForeignFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="YAML or JSON that another system reads.",
        callback=takes(PathKind.FOREIGN_CONFIG, PathKind.SCRIPT),
    ),
]
Configuration = Annotated[
    Path,
    typer.Argument(help="A YAML file, or the directory of a run.", callback=takes(PathKind.RUN_FILE, PathKind.RUN)),
]
