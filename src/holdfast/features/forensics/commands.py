"""`holdfast prove`, `replay` and `explain-mismatch`."""

# As cli/main.py, without `from __future__ import annotations`.
from enum import StrEnum
from typing import Annotated

import typer

from holdfast.cli.arguments import Overrides, RecordedRun, RunFile


class Damage(StrEnum):
    """What `prove --break` damages."""

    rng = "rng"
    cursor = "cursor"
    optimizer = "optimizer"


def prove(
    run: RunFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=2, help="Updates of each run.")] = 12,
    kill_at: Annotated[int, typer.Option(min=2, help="The update in which a rank is killed.")] = 7,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the rank and the phase.")] = 0,
    break_: Annotated[
        Damage | None, typer.Option("--break", help="Damage the resumed state: the proof must then fail.")
    ] = None,
) -> None:
    """Kill a run, resume it, and compare it bit for bit with one that was not killed; exit 1 if they differ."""
    from holdfast.features.forensics.proving import prove as prove_run

    raise typer.Exit(
        prove_run(
            run,
            overrides or [],
            steps=steps,
            kill_at=kill_at,
            seed=seed,
            break_=None if break_ is None else break_.value,
        )
    )


def replay(
    directory: RecordedRun,
    step: Annotated[int, typer.Option(min=1, help="Which step to make again.")],
) -> None:
    """Make one recorded step again, on one CPU process, and compare its loss and gradient; exit 1 if they differ."""
    from holdfast.features.forensics.proving import replay as replay_step

    raise typer.Exit(replay_step(directory, step))


def explain_mismatch(
    directory: RecordedRun,
    step: Annotated[int, typer.Option(min=1, help="Which step to look at.")],
) -> None:
    """Say why the sampler's log-probabilities differ from the trainer's, cause by cause; exit 1 if they do."""
    from holdfast.features.forensics.proving import explain

    raise typer.Exit(explain(directory, step))
