"""`holdfast checkpoint check | import | convert` and `config import`: other systems' checkpoints and files."""

# As cli/main.py, without `from __future__ import annotations`.
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.arguments import Dtype, ForeignFile, takes, torch_dtype
from holdfast.config.path_kinds import MODEL_PATH, PathKind
from holdfast.errors import ConfigError


class ForeignLevelOption(StrEnum):
    """How closely another system's checkpoint is looked at."""

    headers = "headers"
    tensors = "tensors"


ForeignArgument = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="A checkpoint of another system, or its run.",
        show_default=False,
        callback=takes(PathKind.FOREIGN_CHECKPOINT, *MODEL_PATH, PathKind.ADAPTER, PathKind.WEIGHTS),
    ),
]


def check(
    directory: ForeignArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that is known as JSON.")] = False,
    level: Annotated[
        ForeignLevelOption, typer.Option(help="headers alone, or every number of the tensors.")
    ] = ForeignLevelOption.tensors,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The model that its adapters began with, to tell how often they were merged.",
            callback=takes(*MODEL_PATH),
        ),
    ] = None,
) -> None:
    """Say whose checkpoint it is, what is in it, what is damaged and what a resume would lose; exit 1 on damage.

    The last line is the verdict: whole, damaged, or cannot be told, where nothing says whether it is as it was written.

    Reads verl, EasyR1, accelerate, transformers' Trainer, TRL, Lightning, torchtitan, plain DCP and Hugging Face.
    Nothing is written, and nothing that a pickle asks for is run.
    """
    from holdfast.features.rescue import views as foreign_views

    checkpoint = foreign_views.checked(directory, level.value, base)
    for line in [foreign_views.as_json(checkpoint)] if as_json else foreign_views.lines(checkpoint):
        typer.echo(line)
    raise typer.Exit(1 if checkpoint.of_kind("damage") else 0)


def import_checkpoint(  # noqa: PLR0913 - a command's options
    directory: ForeignArgument,
    run: Annotated[
        Path | None,
        typer.Option(
            "--as",
            metavar="RUN.yaml",
            help="Make it a checkpoint of this run, which continues it.",
            callback=takes(PathKind.RUN_FILE),
        ),
    ] = None,
    export_to: Annotated[
        Path | None, typer.Option("--export", metavar="OUT", help="Make it a model directory.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --export: configuration and tokenizer, where none lie beside it.",
            callback=takes(*MODEL_PATH),
        ),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="With --export: of floating-point tensors.")] = Dtype.same,
    data_from_start: Annotated[
        bool, typer.Option("--data-from-start", help="With --as: begin the rows anew, whatever position it states.")
    ] = False,
    step: Annotated[
        int | None, typer.Option(min=0, help="With --as: the step, where the checkpoint does not state it.")
    ] = None,
    trust_rank_order: Annotated[
        bool,
        typer.Option(
            "--trust-rank-order",
            help="Take every rank's file for the one that its name says, where nothing in it does.",
        ),
    ] = False,
) -> None:
    """Make another system's checkpoint one of ours, or a model directory; its own files stay as they are."""
    from holdfast.features.rescue.views import export_checked, import_checked

    if (run is None) == (export_to is None):
        raise ConfigError("Give one of --as RUN.yaml, for a run that continues it, and --export OUT, for a model.")
    if export_to is not None:
        report = export_checked(directory, export_to, model, torch_dtype(dtype), trust_rank_order=trust_rank_order)
    else:
        from holdfast.features.rescue.importing.importing import ImportOptions

        assert run is not None
        report = import_checked(directory, run, ImportOptions(data_from_start, step, trust_rank_order))
    for line in report:
        typer.echo(line)


def convert(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A run, its folder of checkpoints, or one checkpoint.",
            show_default=False,
            callback=takes(PathKind.CHECKPOINT, PathKind.RUN, PathKind.CHECKPOINTS),
        ),
    ],
) -> None:
    """Rewrite checkpoints of format 2 in the present format; every number is compared on the way, and stays."""
    from holdfast.features.rescue.converting import convert as convert_checkpoints

    for line in convert_checkpoints(path):
        typer.echo(line)


def config_import(
    file: ForeignFile,
    system: Annotated[str, typer.Option("--from", help="trl, easyr1, verl, axolotl or llamafactory.")],
    verb: Annotated[
        str | None, typer.Option("--for", help="The command it is for; default: what the file says.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Of the run, where batches there count rows of one device.")] = 1,
    to: Annotated[Path | None, typer.Option(metavar="RUN.yaml", help="Where to write it; default: print it.")] = None,
) -> None:
    """Write another system's file as ours; exit 1 if a key is undecided or the result does not load yet."""
    from holdfast.features.rescue.config_import import import_config

    raise typer.Exit(import_config(file, system, verb, ranks, to))
