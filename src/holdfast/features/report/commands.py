"""`holdfast report`, `watch` and `runs compare`: what happened in runs."""

# As cli/main.py, without `from __future__ import annotations`.
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.arguments import IS_RUN, RunDirectory


def report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="One run, or several to compare.", callback=IS_RUN)
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE.html", help="Default: report.html in the run.")
    ] = None,
) -> None:
    """Write one page about a run, or about several: curves, marks, samples, events. It needs no network."""
    from holdfast.features.report.page import write_page

    typer.echo(write_page(directories, output))


def watch(directory: RunDirectory) -> None:
    """Show a run in the terminal while it goes on: progress, curves, phases, ranks, checkpoints, samples, health."""
    from holdfast.features.report.watch import watch_run

    watch_run(directory)


def compare_runs(
    first: RunDirectory,
    second: Annotated[Path, typer.Argument(metavar="OTHER_RUN_DIR", help="Another one.", callback=IS_RUN)],
) -> None:
    """Compare two runs: configuration, environment, numbers at equal steps, and the first step that differs."""
    from holdfast.features.report.comparison import compare
    from holdfast.features.report.reading import read_run

    for line in compare(read_run(first), read_run(second)):
        typer.echo(line)
