"""`holdfast data`: look at rows."""

# As cli/main.py, without `from __future__ import annotations`.
from typing import Annotated

import typer

from holdfast.cli.arguments import Overrides, RunFile


def data_preview(
    run: RunFile,
    overrides: Overrides = None,
    row: Annotated[int, typer.Option(min=0, help="Which row of the first source, from 0.")] = 0,
) -> None:
    """Print one row as tokens; trained ones are coloured."""
    from holdfast.cli.commands.data.preview import preview

    preview(run, overrides or [], row)


def data_check(
    run: RunFile,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002 - typer's way
) -> None:
    """Read all rows as the run will, before any weight; exit 1 if it would stop at one of them."""
    from holdfast.cli.commands.data.survey import check_data

    raise typer.Exit(check_data(run, overrides or [], as_json=as_json))
