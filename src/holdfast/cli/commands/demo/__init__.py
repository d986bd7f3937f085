"""`holdfast demo`: the main job on two ranks."""

# As cli/main.py, without `from __future__ import annotations`.
from pathlib import Path
from typing import Annotated

import typer


def run_demo(
    directory: Annotated[Path, typer.Option("--dir", help="Where everything is written.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, help="Of both runs.")] = 0,
) -> None:
    """Show the main job on two ranks: SFT, GRPO, a rank killed on the way, resume, verification, export."""
    from holdfast.cli.commands.demo.two_runs import demo

    raise typer.Exit(demo(directory, seed))
