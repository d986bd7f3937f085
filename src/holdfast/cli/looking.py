"""Commands that show what happened in runs, and `push`, which shows a model to others. `main` adds them."""

# As `main`, without `from __future__ import annotations`.
from pathlib import Path
from typing import Annotated

import typer

runs_app = typer.Typer(help="Look at the runs in a directory.", no_args_is_help=True)
RunDirectory = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run, whether it goes on or has ended.")]


def report(
    directories: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="One run, or several to compare.")],
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


def explain_mismatch(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run with rollout.record: true.")],
    step: Annotated[int, typer.Option(min=1, help="Which step to look at.")],
) -> None:
    """Say why the sampler's log-probabilities differ from the trainer's, cause by cause; exit 1 if they do."""
    from holdfast.features.forensics.proving import explain

    raise typer.Exit(explain(directory, step))


def push(
    export: Annotated[Path, typer.Argument(metavar="EXPORT", help="The directory of an exported model.")],
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="On the hub; made if it is not there.")],
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public; default: private.")] = False,  # noqa: FBT002 - typer's way
    overwrite: Annotated[  # noqa: FBT002 - typer's way
        bool, typer.Option("--overwrite", help="Replace files that the repository has with other contents.")
    ] = False,
) -> None:
    """Upload an exported model to the Hugging Face hub, privately, and verify what arrived."""
    from holdfast.cli.after.push import push as push_export

    for line in push_export(export, repository, public=public, overwrite=overwrite):
        typer.echo(line)


@runs_app.command("ls")
def list_runs(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where runs are, or one run.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
) -> None:
    """List runs, the one that was active last first: verb, step, checkpoint, best metric, state and why."""
    from holdfast.cli.after import runs

    runs.list_runs(directory, as_json=as_json)


@runs_app.command("compare")
def compare_runs(
    first: RunDirectory,
    second: Annotated[Path, typer.Argument(metavar="OTHER_RUN_DIR", help="Another one.")],
) -> None:
    """Compare two runs: configuration, environment, numbers at equal steps, and the first step that differs."""
    from holdfast.features.report.comparison import compare
    from holdfast.features.report.reading import read_run

    for line in compare(read_run(first), read_run(second)):
        typer.echo(line)
