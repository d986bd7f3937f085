"""Read the retention rules of a run from its checkpoints, so that they can be applied after the run has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from holdfast.checkpoint.format.settings import settings_of
from holdfast.checkpoint.keep.retention import BestRule, Retention, manifests, steps
from holdfast.checkpoint.place.hashing import hash_bytes
from holdfast.checkpoint.place.layout import ASSETS
from holdfast.checkpoint.place.storage import Storage
from holdfast.config.load import EXPORTED_CONFIG
from holdfast.config.sections.checkpoint import RetentionConfig
from holdfast.config.sections.measured import MetricConfig
from holdfast.errors import ConfigError
from holdfast.metrics.sink import METRICS, last_rewind


@dataclass(frozen=True)
class RecordedRetention:
    """Retention rules, and the directions of metrics, as a run's configuration has them."""

    retention: Retention
    modes: Mapping[str, frozenset[Literal["max", "min"]]]
    """By metric: which way is better, as `keep.best` and `export_best` have it."""


def retention_of(keep: RetentionConfig) -> Retention:
    """Return what a configuration keeps."""
    return Retention(keep.last, keep.every, tuple(BestRule(best.metric, best.mode, best.count) for best in keep.best))


def read_retention(storage: Storage) -> RecordedRetention | None:
    """Return what the newest checkpoint says of its run; None where none was written by a run.

    Raises:
        ConfigError: Another version wrote keys that this one does not know.
    """
    names = steps(storage)
    file = f"{ASSETS}/{EXPORTED_CONFIG}"
    for step, manifest in sorted(manifests(storage).items(), reverse=True):
        path = f"{names[step]}/{file}"
        if file not in manifest.files or not storage.exists(path):
            continue
        data = storage.read(path)
        if hash_bytes(data) == manifest.files[file].hash:
            return _parsed(settings_of(data, f"{storage.root}/{path}")["checkpoint"], f"{storage.root}/{path}")
    return None


def _parsed(section: Mapping[str, Any], path: str) -> RecordedRetention:
    try:
        keep = RetentionConfig.model_validate(section["keep"])
        exported = section.get("export_best")
        rated: list[MetricConfig] = [*keep.best, *([MetricConfig.model_validate(exported)] if exported else [])]
    except ValidationError as error:
        raise ConfigError(
            f"{path} says what its run keeps in words that this version does not know "
            f"({error.error_count()} of them). Use the version of Holdfast that wrote it."
        ) from error
    modes = {
        rule.metric: frozenset(candidate.mode for candidate in rated if candidate.metric == rule.metric)
        for rule in rated
    }
    return RecordedRetention(retention_of(keep), modes)


def better(record: RecordedRetention | None, metric: str, mode: str | None) -> Literal["max", "min"]:
    """Return whether more of a metric is better: as asked for, else as the run was configured.

    Raises:
        ConfigError: Nobody says, or the configuration says both.
    """
    modes = record.modes.get(metric, frozenset()) if record is not None else frozenset()
    match mode:
        case "max" | "min":
            return mode
        case None if len(modes) == 1:
            return next(iter(modes))
        case None:
            raise ConfigError(
                f"The run does not say whether more of {metric} is better or less of it (checkpoint.keep.best and "
                "export_best would). Give --mode max or --mode min."
            )
    raise ConfigError(f"--mode {mode} is neither max nor min.")


def resume_source(storage: Storage) -> int | None:
    """Return the step that a run last went on from; None if it never did, or lies where no log of it is."""
    log = Path(storage.root).parent / METRICS
    return last_rewind(log) if log.is_file() else None
