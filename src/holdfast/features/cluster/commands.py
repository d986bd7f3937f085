"""`holdfast launch slurm | ray`."""

# As cli/main.py, without `from __future__ import annotations`.
from typing import Annotated

import typer

from holdfast.cli.arguments import Overrides, RunFile


def run_by_slurm(  # noqa: PLR0913, PLR0917 - each is an option of the command
    run: RunFile,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs and ranks of each.", show_default="launch.ranks, and no GPUs")
    ] = None,
    time: Annotated[str | None, typer.Option(help="Limit, such as 12:00:00.", show_default="the partition's")] = None,
    interface: Annotated[str | None, typer.Option(help="Network interface over which the machines talk.")] = None,
    to_submit: Annotated[bool, typer.Option("--submit", help="Hand it to sbatch instead of printing it.")] = False,
) -> None:
    """Print a batch job for Slurm that requeues itself until the run is done, or submit it."""
    from holdfast.features.cluster.submission import SlurmOptions, launch_slurm

    launch_slurm(run, overrides or [], SlurmOptions(nodes, gpus_per_node, time, interface), to_submit=to_submit)


def run_by_ray(  # noqa: PLR0913, PLR0917 - each is an option of the command
    run: RunFile,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes, on all machines together.")] = 1,
    gpus_per_rank: Annotated[int, typer.Option(min=0, help="0: ranks compute on CPUs.")] = 0,
    address: Annotated[
        str | None, typer.Option(help="Of a cluster; auto: the one that runs here.", show_default="Ray decides")
    ] = None,
) -> None:
    """Run on a Ray cluster, an actor a rank, and end with the run's exit code."""
    from holdfast.features.cluster.ray import RayOptions
    from holdfast.features.cluster.submission import launch_on_ray

    raise typer.Exit(launch_on_ray(run, overrides or [], RayOptions(ranks, gpus_per_rank, address)))
