"""`holdfast launch`: hand a run to Slurm or Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from holdfast.config.verbs.roots import load_run
from holdfast.features.cluster.ray import RayOptions, launch_ray
from holdfast.features.cluster.slurm import Job, batch_script, check_cluster, submit
from holdfast.files import python_module
from holdfast.launch.environment import resolve_ranks
from holdfast.launch.fewer import fewer_ranks
from holdfast.launch.start import check_paths
from holdfast.training.directory import run_directory


@dataclass(frozen=True)
class SlurmOptions:
    """What the command line asks of Slurm; see `Job`."""

    nodes: int
    gpus_per_node: int | None
    time: str | None
    interface: str | None


def launch_on_ray(file: Path, overrides: Sequence[str], options: RayOptions) -> int:
    """Run on a Ray cluster, and return the exit code of the run.

    Raises:
        UserError: The run would be refused, or Ray has no place for it.
    """
    loaded = load_run(file, overrides)
    verb = loaded.config.verb
    fewer = fewer_ranks(loaded.config, options.ranks)
    check_paths(verb, loaded.config, loaded.base)
    command = [*python_module("holdfast.cli.main"), verb, str(file), *overrides]
    return launch_ray(command, options, loaded.config.launch, fewer)


def launch_slurm(file: Path, overrides: Sequence[str], options: SlurmOptions, *, to_submit: bool) -> None:
    """Print the batch job of a run, or submit it.

    Raises:
        UserError: The run would be refused, or Slurm has no place for the job.
    """
    loaded = load_run(file, overrides)
    config = loaded.config
    ranks_per_node = options.gpus_per_node or resolve_ranks(config.launch)
    fewer_ranks(config, options.nodes * ranks_per_node)
    check_paths(config.verb, config, loaded.base)
    job = Job(
        command=[config.verb, str(file), *overrides],
        run_directory=run_directory(config),
        nodes=options.nodes,
        ranks_per_node=ranks_per_node,
        gpus_per_node=options.gpus_per_node or 0,
        time=options.time,
        interface=options.interface,
        grace_seconds=config.checkpoint.grace_seconds,
        elastic=config.launch.min_ranks is not None,
    )
    text = batch_script(job)
    if to_submit:
        check_cluster(job)
        typer.echo(submit(text))
    else:
        typer.echo(text, nl=False)
