"""Exports of a run: when it ends, every so many steps, and whenever it got better."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from holdfast.checkpoint.export import EXPORTED_CONFIG, check_names, export
from holdfast.training import directory
from holdfast.training.run import Run


def check_export(run: Run) -> None:
    """Plan an export without a tensor: names and shapes of the model directory.

    Raises:
        ModelError: A parameter has no place in it.
    """
    check_names(run.policy, run.origin, _dtype(run))


def export_run(run: Run, name: str) -> str:
    """Write exports/<name> and return the path; all ranks call this together."""
    place = run.directory / "exports" / name
    with run.phase("export"):
        export(
            run.policy,
            run.origin,
            place,
            run.exchange,
            dtype=_dtype(run),
            largest_file_bytes=run.config.checkpoint.export_shard_bytes,
            extra_files={EXPORTED_CONFIG: directory.resolved_yaml(run.config)},
        )
    return str(place)


def due_exports(run: Run, metrics: Mapping[str, float]) -> list[str]:
    """Return the names of exports that follow a step; noting a new best marks it as known."""
    config = run.config.checkpoint
    names = []
    if config.export_every is not None and run.state.step % config.export_every == 0:
        names.append(f"step-{run.state.step:08d}")
    wanted = config.export_best
    if wanted is not None and wanted.metric in metrics:
        value, best = metrics[wanted.metric], run.state.best_exported
        if best is None or (value > best if wanted.mode == "max" else value < best):
            run.state.best_exported = value
            names.append("best")
    return names


def _dtype(run: Run) -> torch.dtype | None:
    wanted = run.config.checkpoint.export_dtype
    return None if wanted == "same" else getattr(torch, wanted)
