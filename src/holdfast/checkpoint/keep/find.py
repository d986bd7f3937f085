"""Find checkpoints by the path of a run, of its folder of checkpoints, of one checkpoint, or by a URL."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from holdfast.checkpoint.errors import CheckpointError, NoCheckpoint
from holdfast.checkpoint.format.manifest import NAME, Manifest
from holdfast.checkpoint.format.verification import check_names, read_manifest
from holdfast.checkpoint.inspect.tensors import StoredCheckpoint
from holdfast.checkpoint.keep.retention import manifests, steps
from holdfast.checkpoint.keep.retention_record import better, read_retention
from holdfast.checkpoint.place.layout import FOLDER, step_of
from holdfast.checkpoint.place.storage import Storage, open_storage


def folder_of(path: str) -> Storage:
    """Return the storage of a run's checkpoints.

    Args:
        path: A run directory, its folder of checkpoints, or a URL of the latter.

    Raises:
        NoCheckpoint: No checkpoint is there.
    """
    for candidate in (f"{path.rstrip('/')}/{FOLDER}", path):
        storage = open_storage(candidate)
        if steps(storage):
            return storage
    storage = open_storage(path)
    read_manifest(storage, "")  # says what it is instead
    raise NoCheckpoint(f"{path} is one checkpoint; name its run, {PurePosixPath(path).parent.parent}.")


def one(run_path: str) -> StoredCheckpoint:
    """Return the checkpoint at a path; of a run, its newest without NaN or infinity in it, or else its newest.

    Names and sizes are verified.

    Raises:
        NoCheckpoint: There is none.
        CheckpointCorrupt: Its manifest is damaged, or a file is missing.
    """
    scheme, colon, bare_path = run_path.rstrip("/").rpartition("://")
    path = PurePosixPath(bare_path) if colon else PurePosixPath(Path(bare_path).absolute())
    storage, name = open_storage(f"{scheme}{colon}{path.parent}"), path.name
    if not storage.exists(f"{name}/{NAME}") and step_of(name) is None:
        try:
            storage = folder_of(run_path)
        except NoCheckpoint:
            raise NoCheckpoint(str(_why_not(storage, name))) from None
        newest_first = list(reversed(steps(storage).values()))
        name = next((name for name in newest_first if read_manifest(storage, name).finite), newest_first[0])
    manifest = read_manifest(storage, name)
    check_names(storage, name, manifest)
    return StoredCheckpoint(storage, name, manifest)


def newer_not_finite(checkpoint: StoredCheckpoint) -> list[int]:
    """Return the steps after a checkpoint's own that `one` passed over."""
    return [step for step in steps(checkpoint.storage) if step > checkpoint.manifest.step]


def _why_not(storage: Storage, name: str) -> CheckpointError | NoCheckpoint:
    try:
        read_manifest(storage, name)
    except (NoCheckpoint, CheckpointError) as error:
        return error
    raise AssertionError(name)


def best(storage: Storage, metric: str, mode: str | None) -> tuple[str, Manifest]:
    """Return the checkpoint with the best metric of its own step; of equal ones the later.

    Args:
        storage: A run's checkpoints.
        metric: As in metrics.jsonl.
        mode: max or min; None: as the run was configured.

    Raises:
        NoCheckpoint: No checkpoint has such a metric; the known ones are named.
        ConfigError: Nobody says whether more of it is better.
    """
    healthy = {step: manifest for step, manifest in manifests(storage).items() if manifest.finite}
    rated = [(value, step) for step, manifest in healthy.items() if (value := manifest.metrics.get(metric)) is not None]
    if not rated:
        metric_names = sorted({name for manifest in healthy.values() for name in manifest.metrics})
        raise NoCheckpoint(
            f"No checkpoint in {storage.root} has the metric {metric}; they have {', '.join(metric_names)}."
        )
    sign = 1.0 if better(read_retention(storage), metric, mode) == "max" else -1.0
    step = max(rated, key=lambda pair: (sign * pair[0], pair[1]))[1]
    return steps(storage)[step], healthy[step]
