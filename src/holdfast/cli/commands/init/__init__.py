"""`holdfast init`: a first configuration."""

# As cli/main.py, without `from __future__ import annotations`.
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.arguments import IS_MODEL, Rows, Teacher


def init_run(
    verb: Annotated[
        str | None, typer.Argument(metavar="[sft|dpo|reward|grpo|distill]", help="Default: what the rows are for.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A model's directory, or its name on the hub.", callback=IS_MODEL)
    ] = None,
    data: Rows = None,
    teacher: Teacher = None,
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("run.yaml"),
) -> None:
    """Write a first configuration from what a model and the first rows show, with the reasons."""
    from holdfast.cli.commands.init.first_file import write_first_file

    write_first_file(verb, model, data, output, teacher)
