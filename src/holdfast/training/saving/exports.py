"""Exports of a run: at its end, at regular steps, and whenever a metric improves."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from holdfast.checkpoint.export.about import Exported, read_about
from holdfast.checkpoint.export.adapters import Description, export_adapters
from holdfast.checkpoint.export.card import Papers, card_of
from holdfast.checkpoint.export.write import check_export_names, export, raised_together, sync_directory
from holdfast.checkpoint.place.layout import LATER, TRASH, fresh, step_name
from holdfast.config.load import EXPORTED_CONFIG
from holdfast.config.verbs.training import as_plain
from holdfast.errors import ModelError
from holdfast.models.adapters.files import peft_settings
from holdfast.models.adapters.live import adapters_of, whole_modules
from holdfast.models.files.origin import files_fingerprint
from holdfast.training import directory
from holdfast.training.run import Training

EXPORTS, BEST = "exports", "best"
FINAL = "final"
_KINDS = ("-adapter", "-ema-adapter", "-ema", "")
"""Suffixes of exports that are made together; the one without a suffix is written last and completes the set."""


def check_export(training: Training) -> None:
    """Plan an export without a tensor: names and shapes of the model directory, and the settings of adapters.

    Raises:
        ModelError: A parameter has no place in it.
    """
    check_export_names(training.model.module, training.model.blueprint, _dtype(training))
    describe_adapters(training)


def describe_adapters(training: Training) -> Description | None:
    """Return what is written of a run's adapters beside their tensors; None of a run that exports none."""
    lora = training.run.config.model.lora
    module_names = None if lora is None else whole_modules(training.model.module)
    if lora is None or module_names is None:  # peft's two files would lack part of what is trained
        return None
    base = training.run.config.model.path or ""
    settings = peft_settings(
        adapters_of(training.model.module), lora, base, list(module_names), scorer=training.run.config.scores
    )
    directory = training.model.blueprint.directory
    return Description(settings, None if directory is None else files_fingerprint(directory))


def export_run(training: Training, name: str, metrics: Mapping[str, float] | None = None) -> str:
    """Write exports/<name> and return the path; all ranks call this together.

    Args:
        training: The run.
        name: Of the export.
        metrics: Of this step; what a best export is the best of stands in it, and what its card says of evaluations.

    Of a model with adapters that is the model with the adapters merged, and exports/<name>-adapter holds them alone.
    Averages of the weights go to exports/<name>-ema, or in the place of the weights. exports/<name> comes last:
    where a kill leaves it out, the next start makes all of them again.
    """
    ema, best, rating = training.run.config.optim.ema, training.run.config.checkpoint.export_best, None
    if name == BEST and best is not None and metrics is not None:
        rating = {"metric": best.metric, "value": training.run.ranks.agree(metrics.get(best.metric))}
    with raised_together(training.run.directory / EXPORTS / name, training.run.ranks):
        about = Exported("", training.run.config.run.name, training.model.state.step, rating=rating)
        # Who writes; and a run that somebody builds in Python, without the loop around it, has no directory.
        if training.run.world.is_first and directory.is_run(training.run.directory):
            parent = directory.parent(training.run.directory)
            about = replace(about, run_id=directory.run_id(training.run.directory), parent=parent)
    if ema is not None and ema.export != "none":
        with training.model.averaged():
            averages = replace(about, weights="averages")
            path = _export(training, name if ema.export == "instead" else f"{name}-ema", averages, metrics or {})
        if ema.export == "instead":
            return path
    return _export(training, name, about, metrics or {})


def _export(training: Training, name: str, exported: Exported, metrics: Mapping[str, float]) -> str:
    path = training.run.directory / EXPORTS / name
    with training.run.phase("export"):
        with raised_together(path, training.run.ranks):
            config, data = training.run.config, training.identity.get("data", {})
            card = card_of(as_plain(config), config.verb, exported, metrics, data)
            papers = Papers(exported, card, {EXPORTED_CONFIG: directory.portable_yaml(config)})
            about = describe_adapters(training)
        if about is not None:
            export_adapters(
                training.model.module,
                about,
                path.with_name(f"{name}-adapter"),
                training.run.ranks,
                papers,
                reached=lambda name: training.run.world.failure.phase(f"adapter export: {name}"),
            )
        export(
            training.model.module,
            training.model.blueprint,
            path,
            training.run.ranks,
            dtype=_dtype(training),
            largest_file_bytes=training.run.config.checkpoint.export_shard_bytes,
            papers=papers,
            reached=lambda name: training.run.world.failure.phase(f"export: {name}"),
        )
    return str(path)


def due_exports(training: Training, metrics: Mapping[str, float]) -> list[str]:
    """Return the names of exports that follow a step, the same on every rank.

    Times and memory differ between ranks, so rank 0's metrics decide.
    """
    config = training.run.config.checkpoint
    if config.export_every is None and config.export_best is None:
        return []
    return training.run.ranks.agree(_due(training, metrics) if training.run.world.is_first else [])


def note_exported(training: Training, name: str, metrics: Mapping[str, float]) -> None:
    """Remember the metric of a best export that stands; all ranks call this together."""
    section = training.run.config.checkpoint.export_best
    if name == BEST and section is not None:
        training.model.state.best_exported = training.run.ranks.agree(metrics.get(section.metric))


def _due(training: Training, metrics: Mapping[str, float]) -> list[str]:
    config = training.run.config.checkpoint
    names = []
    if config.export_every is not None and training.model.state.step % config.export_every == 0:
        names.append(f"step-{training.model.state.step:08d}")
    section = config.export_best
    if section is not None and section.metric in metrics:
        value, earlier_values = (
            metrics[section.metric],
            (training.model.state.best_exported, _rated(training, section.metric)),
        )
        better = max if section.mode == "max" else min
        best = better((earlier_value for earlier_value in earlier_values if earlier_value is not None), default=None)
        if math.isfinite(value) and (best is None or better(value, best) != best):
            names.append(BEST)
    return names


def _rated(training: Training, metric: str) -> float | None:
    """Read the value of the current best export from disk; a run that lost its last steps may not remember it."""
    path = training.run.directory / EXPORTS / BEST
    try:
        about = read_about(path)
        rating = None if about is None else about.rating
        return None if rating is None or rating["metric"] != metric else float(rating["value"])
    except (ModelError, OSError, ValueError, KeyError, TypeError):
        return None


def rename_final_export(training: Training) -> list[str]:
    """Rename exports/final, which an earlier end of the run left, to its step: training goes on beyond it.

    Returns:
        Words about each.
    """
    paths = {kind: training.run.directory / EXPORTS / f"{FINAL}{kind}" for kind in _KINDS}
    return training.run.ranks.on_first_rank(
        lambda: [
            _rename_to_step(paths[kind], kind, training.model.state.step) for kind in _KINDS if paths[kind].is_dir()
        ]
    )


def _rename_to_step(path: Path, kind: str, current_step: int) -> str:
    """Give an export the name of its step; it is removed where that one exists, which the run exported as well."""
    about = read_about(path)
    step = f"before-{step_name(current_step)}" if about is None else step_name(about.step)
    target = path.with_name(f"{step}{kind}")
    if target.exists():
        # As a kill must not leave half of it under its name, it loses that first; `clean_exports` finds the rest.
        target = path.with_name(fresh(TRASH, path.name))
    path.rename(target)
    sync_directory(path.parent)
    if target.name.startswith(TRASH):
        shutil.rmtree(target, ignore_errors=True)
        return f"exports/{path.name} was removed, since training goes on and exports/{step}{kind} is of its step"
    return f"exports/{path.name} is now exports/{target.name}, since training goes on beyond its step"


def rename_best_export(training: Training, step: int) -> list[str]:
    """Rename exports/best where it is of a later step than the one that a run goes back to, on the first rank alone.

    Its steps will be made again, so it takes none of their names, and no other export is in its way.

    Returns:
        Words about each.
    """
    folder, messages = training.run.directory / EXPORTS, []
    for kind in _KINDS:
        path = folder / f"{BEST}{kind}"
        its_step = _rated_step(path)
        if its_step is not None and its_step > step:
            aside = path.rename(folder / fresh(LATER, f"{step_name(its_step)}{kind}"))
            sync_directory(folder)
            messages.append(f"exports/{path.name} is kept as {aside}")
    return messages


def _rated_step(path: Path) -> int | None:
    """Return the step of a best export; None where none stands, or it does not say its step."""
    with suppress(ModelError, OSError, ValueError, KeyError, TypeError):
        if (about := read_about(path)) is not None:
            return about.step
    return None


def describe_exports(run_directory: Path) -> str:
    """Return the names of a run's exports and their steps in words; "" where there are none."""
    names = []
    for path in sorted((run_directory / EXPORTS).glob("[!.]*")):
        with suppress(ModelError):  # damaged: it says nothing of itself
            about = read_about(path)
            names.append(path.name if about is None else f"{path.name} (step {about.step})")
    return ", ".join(names)


def _dtype(training: Training) -> torch.dtype | None:
    dtype_name = training.run.config.checkpoint.export_dtype
    return None if dtype_name == "same" else getattr(torch, dtype_name)
