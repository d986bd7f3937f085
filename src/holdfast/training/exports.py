"""Exports of a run: when it ends, every so many steps, and whenever it got better."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from holdfast.checkpoint.adapter_export import Description, export_adapters
from holdfast.checkpoint.export import EXPORTED_CONFIG, check_names, export
from holdfast.models.adapter_files import peft_settings
from holdfast.models.adapters import adapters_of
from holdfast.models.origin import files_mark
from holdfast.models.whole_modules import whole_modules
from holdfast.training import directory
from holdfast.training.run import Run

EXPORTS, BEST = "exports", "best"


def check_export(run: Run) -> None:
    """Plan an export without a tensor: names and shapes of the model directory, and the settings of adapters.

    Raises:
        ModelError: A parameter has no place in it.
    """
    check_names(run.policy, run.origin, _dtype(run))
    describe_adapters(run)


def describe_adapters(run: Run) -> Description | None:
    """Return what is written of a run's adapters beside their tensors; None of a run that exports none."""
    lora = run.config.model.lora
    whole = None if lora is None else whole_modules(run.policy)
    if lora is None or whole is None:  # peft's two files would lack part of what is trained
        return None
    base = run.config.model.path or ""
    settings = peft_settings(adapters_of(run.policy), lora, base, list(whole), scorer=run.config.scores)
    directory = run.origin.directory
    return Description(settings, None if directory is None else files_mark(directory))


def export_run(run: Run, name: str) -> str:
    """Write exports/<name> and return the path; all ranks call this together.

    Of a model with adapters that is the model with the adapters merged, and exports/<name>-adapter holds them alone.
    Averages of the weights are written to exports/<name>-ema, or in the place of the weights.
    """
    ema = run.config.optim.ema
    if ema is not None and ema.export != "none":
        with run.averaged():
            place = _export(run, name if ema.export == "instead" else f"{name}-ema")
        if ema.export == "instead":
            return place
    return _export(run, name)


def _export(run: Run, name: str) -> str:
    place = run.directory / EXPORTS / name
    with run.phase("export"):
        export(
            run.policy,
            run.origin,
            place,
            run.exchange,
            dtype=_dtype(run),
            largest_file_bytes=run.config.checkpoint.export_shard_bytes,
            extra_files={EXPORTED_CONFIG: directory.resolved_yaml(run.config)},
            reached=lambda name: run.world.failure.phase(f"export: {name}"),
        )
        about = describe_adapters(run)
        if about is not None:
            texts = {EXPORTED_CONFIG: directory.resolved_yaml(run.config)}
            export_adapters(
                run.policy,
                about,
                place.with_name(f"{name}-adapter"),
                run.exchange,
                texts,
                reached=lambda name: run.world.failure.phase(f"adapter export: {name}"),
            )
    return str(place)


def due_exports(run: Run, metrics: Mapping[str, float]) -> list[str]:
    """Return the names of exports that follow a step, the same on every rank.

    Times and memory differ between ranks, so rank 0's metrics decide.
    """
    config = run.config.checkpoint
    if config.export_every is None and config.export_best is None:
        return []
    return run.exchange.agree(_due(run, metrics) if run.world.is_first else [])


def note_exported(run: Run, name: str, metrics: Mapping[str, float]) -> None:
    """Remember the metric of a best export that stands; all ranks call this together."""
    wanted = run.config.checkpoint.export_best
    if name == BEST and wanted is not None:
        run.state.best_exported = run.exchange.agree(metrics.get(wanted.metric))


def _due(run: Run, metrics: Mapping[str, float]) -> list[str]:
    config = run.config.checkpoint
    names = []
    if config.export_every is not None and run.state.step % config.export_every == 0:
        names.append(f"step-{run.state.step:08d}")
    wanted = config.export_best
    if wanted is not None and wanted.metric in metrics:
        value, best = metrics[wanted.metric], run.state.best_exported
        if not math.isfinite(value):
            return names
        if best is None or (value > best if wanted.mode == "max" else value < best):
            names.append(BEST)
    return names


def _dtype(run: Run) -> torch.dtype | None:
    wanted = run.config.checkpoint.export_dtype
    return None if wanted == "same" else getattr(torch, wanted)
