"""`holdfast plan`, `doctor` and `env`: a run before it starts."""

# As cli/main.py, without `from __future__ import annotations`.
from typing import Annotated

import typer

from holdfast.cli.arguments import OptionalRunFile, Overrides, RunFile


def doctor(
    run: OptionalRunFile = None,
    overrides: Overrides = None,
    no_code: Annotated[
        bool, typer.Option("--no-code", help="Run no code of yours: rewards, tests of rows, code of a model.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="CHECK", help="Look at this alone; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
) -> None:
    """Look at everything that a run needs before it starts, each with what mends it; exit 1 if something fails."""
    import signal

    from holdfast.features.plan.doctor import doctor as look_before

    # SIGTERM would end Python at once and leave a dry run and its directory; KeyboardInterrupt ends them.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise typer.Exit(look_before(run, overrides or [], runs_code=not no_code, as_json=as_json, only=only or []))


def env(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
) -> None:
    """Print what a bug report needs: versions, devices, known variables; no secrets."""
    from holdfast.features.plan.doctor import environment

    environment(as_json=as_json)


def plan(  # noqa: PLR0913, PLR0917 - each is an option of the command
    run: RunFile,
    overrides: Overrides = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Default: launch.ranks, or 1.")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="h100, h200, a100, l40s, b200 or cpu. Default: h100, or cpu where launch.device is."),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Of each device, as in 40GiB. Default: the device's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Also leave it as plan.json in the run's directory.")] = False,
    longest: Annotated[
        bool, typer.Option("--longest", help="Search the longest row that fits, for each parallel.context; minutes.")
    ] = False,
) -> None:
    """Say what a run takes on devices that are not here, and what to turn; exit 1 if it does not fit."""
    from holdfast.features.plan.planning import PlanOptions
    from holdfast.features.plan.planning import plan as plan_run

    raise typer.Exit(
        plan_run(run, overrides or [], PlanOptions(ranks, device, memory, longest), as_json=as_json, save=save)
    )
