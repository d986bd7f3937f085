"""What `holdfast checkpoint` prints, pins and deletes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from holdfast.checkpoint.errors import CheckpointError, NoCheckpoint
from holdfast.checkpoint.format.manifest import Manifest, OtherFormat
from holdfast.checkpoint.format.verification import Level, check_headers, check_names, read_manifest, verify_checkpoint
from holdfast.checkpoint.keep import find
from holdfast.checkpoint.keep.retention import (
    BestRule,
    Retention,
    apply_retention,
    has_any,
    kept_steps,
    manifests,
    read_pins,
    renamed_checkpoints,
    steps,
    write_pins,
)
from holdfast.checkpoint.keep.retention_record import better, read_retention, resume_source
from holdfast.checkpoint.loading.wrapped_state import records
from holdfast.checkpoint.place.layout import FOLDER, NOT_FINITE, QUARANTINE, step_name
from holdfast.checkpoint.place.lease import Lease
from holdfast.checkpoint.place.storage import Storage, open_storage
from holdfast.errors import ConfigError, HoldfastError

SHOWN = ("loss", "reward")
"""Metrics of a listing, besides those that are asked for and one of an evaluation."""


def listing(path: str, metrics: Sequence[str]) -> Iterator[str]:
    """Yield a table of a run's checkpoints."""
    storage = _folder(path)
    pins, columns = read_pins(storage), list(metrics)
    for step, name in steps(storage).items():
        try:
            manifest = read_manifest(storage, name)
            check_names(storage, name, manifest)
        except OtherFormat as error:
            yield f"{name}  unknown: {error}"
            continue
        except (CheckpointError, NoCheckpoint) as error:
            if not _was_deleted(storage, name):
                yield f"{name}  damaged: {error}"
            continue
        columns = columns or _shown(manifest)
        cells = [f"{manifest.bytes_ / 2**20:,.1f} MiB", "+".join(manifest.contents)]
        cells += [f"{metric}={_number(manifest.metrics.get(metric))}" for metric in columns]
        cells += ["pinned"] if step in pins else []
        cells += [] if manifest.finite else ["not finite"]
        yield f"{name}  {'  '.join(cells)}"
    yield from renamed_checkpoints(storage)
    for name in _put_aside(storage):
        yield f"{name}  {'not finite' if NOT_FINITE in name else 'damaged'}, put aside"


def _folder(path: str) -> Storage:
    """Return a run's checkpoints; also where all of them were damaged and put aside."""
    try:
        return find.folder_of(path)
    except NoCheckpoint:
        for candidate in (f"{path.rstrip('/')}/{FOLDER}", path):
            storage = open_storage(candidate)
            if has_any(storage):
                return storage
        raise


def _put_aside(storage: Storage) -> list[str]:
    return [name for name in storage.names() if name.startswith(QUARANTINE)]


def _shown(manifest: Manifest) -> list[str]:
    evaluated = [name for name in manifest.metrics if name.startswith("eval/") and name.endswith("/loss")]
    return [name for name in SHOWN if name in manifest.metrics] + evaluated[:1]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def description(path: str) -> Iterator[str]:
    """Yield what a checkpoint says of itself.

    Raises:
        CheckpointCorrupt: A file of tensors does not hold the tensors that the manifest lists.
    """
    checkpoint = find.one(path)
    manifest = checkpoint.manifest
    check_headers(checkpoint.storage, checkpoint.name, manifest)  # the files hold what the manifest says of tensors
    yield f"checkpoint {checkpoint.path}"
    yield f"run {manifest.run_id}, step {manifest.step}, hash {manifest.hash}"
    if manifest.parent_step is not None:
        yield f"after step {manifest.parent_step}, hash {manifest.parent}"
    yield f"contents {', '.join(manifest.contents)}; {len(manifest.files)} files, {manifest.bytes_:,} bytes"
    yield f"written by {_pairs(manifest.mesh)} in {manifest.seconds:.2f} s; {_pairs(manifest.versions)}"
    trained = sum(entry.requires_grad for entry in manifest.tensors.values())
    dtypes = Counter(entry.dtype for entry in manifest.tensors.values())
    yield f"{len(manifest.tensors)} tensors ({_pairs(dtypes)}), {trained} trained parameters"
    yield from _optimizer(manifest)
    for name, aliases in manifest.ties.items():
        yield f"tied: {name} = {', '.join(aliases)}"
    if not manifest.finite:
        yield "not finite: a tensor holds NaN or infinity"
    for deviation in manifest.deviations:
        yield f"declared: {deviation}"
    for name, value in manifest.metrics.items():
        yield f"  {name} {_number(value)}"
    for name, entry in sorted(manifest.tensors.items()):
        yield f"  {name} {entry.dtype} {list(entry.shape)}"


def _optimizer(manifest: Manifest) -> Iterator[str]:
    if manifest.optimizer is not None:
        yield f"optimizer {manifest.optimizer['kind']}"
        slots = [slot for slots in records(manifest).values() for slot in slots.values()]
        classes = Counter(slot["class"] for slot in slots).items()
        yield from (f"  {count} tensors of its state are {kind}, in parts" for kind, count in classes)


def _pairs(values: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _was_deleted(storage: Storage, name: str) -> bool:
    """Whether a checkpoint is gone since it was listed: its run goes on, and retention deletes."""
    return name not in storage.names()


def verification(path: str, level: Level) -> tuple[list[str], bool]:
    """Return one line per checkpoint, and whether all are whole."""
    of_run = True
    try:
        storage = _folder(path)
        names = list(steps(storage).values())
    except (NoCheckpoint, CheckpointError, OtherFormat):
        storage, names = _single(path)
        of_run = False
    lines = [] if names else [f"damaged and put aside: {storage.root}/{name}" for name in _put_aside(storage)]
    all_whole = not lines
    for name in names:
        try:
            manifest = verify_checkpoint(storage, name, level)
        except OtherFormat as error:
            if not of_run:
                raise
            lines.append(f"unknown: {error}")
            all_whole = False
        except (CheckpointError, NoCheckpoint, FileNotFoundError) as error:
            if _was_deleted(storage, name):
                lines.append(f"deleted meanwhile: {storage.root}/{name}")
                continue
            lines.append(f"damaged: {error}")
            all_whole = False
        else:
            lines.append(
                f"whole: {storage.root}/{name} ({len(manifest.files)} files, {len(manifest.tensors)} tensors, "
                f"level {level})"
            )
    return lines, all_whole


def _single(target: str) -> tuple[Storage, list[str]]:
    path = target.rstrip("/")
    parent, _, name = path.rpartition("/") if "://" in path else str(Path(path).absolute()).rpartition("/")
    storage = open_storage(parent)
    if not storage.exists(f"{name}/manifest.json"):
        find.one(target)  # says what is there instead
    return storage, [name]


@contextmanager
def writing(storage: Storage) -> Iterator[None]:
    """Tell a user in a sentence that a directory cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{storage.root} cannot be written: {error.strerror or error}. Nothing was changed."
        ) from error


def pinned(path: str, step: int, *, remove: bool) -> str:
    """Pin or unpin a step, and return what is pinned then."""
    storage = find.folder_of(path)
    existing_steps = steps(storage)
    if step not in existing_steps and not remove:
        raise NoCheckpoint(f"{storage.root} has no step {step}. It has {', '.join(map(str, existing_steps))}.")
    pins = read_pins(storage)
    pins = pins - {step} if remove else pins | {step}
    with writing(storage):
        write_pins(storage, pins)
        if not remove and step not in steps(storage):
            write_pins(storage, pins - {step})
            raise NoCheckpoint(f"{storage.root} has no step {step} any more: its run deleted it meanwhile.")
    return f"pinned: {', '.join(map(str, sorted(pins))) or 'none'}"


def pruned(
    path: str,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: Sequence[str],
    mode: str | None,
    *,
    dry_run: bool,
) -> Iterator[str]:
    """Delete what is not kept, and yield one line per deleted step."""
    storage = find.folder_of(path)
    policy, stored = _policy(storage, keep_last, keep_every, keep_best, mode), manifests(storage)
    notes: list[str] = []
    with ExitStack() as stack:
        if not dry_run:
            stack.enter_context(writing(storage))
            stack.enter_context(Lease(storage))
        source = resume_source(storage)
        needed = [_newest_whole(storage, stored)] + ([] if source is None else [source])
        if dry_run:
            keep = kept_steps(stored, policy, pinned=read_pins(storage), needed=needed)
            doomed = sorted(set(stored) - keep)
        else:
            doomed = apply_retention(storage, policy, needed=needed, notify=notes.append, wait=True)
    for step in doomed:
        yield f"{'would delete' if dry_run else 'deleted'} step {step}"
    yield from notes
    yield f"{len(stored) - len(doomed)} checkpoints {'would stay' if dry_run else 'stay'}"


def _policy(
    storage: Storage, keep_last: int | None, keep_every: int | None, keep_best: Sequence[str], mode: str | None
) -> Retention:
    """Return the run's own retention with what was asked for: numbers replace its numbers, metrics come beside."""
    record = read_retention(storage)
    retention = Retention() if record is None else record.retention
    for metric in keep_best:
        find.best(storage, metric, mode)  # a metric that no checkpoint has would keep nothing
    best = [BestRule(metric, better(record, metric, mode)) for metric in keep_best]
    return Retention(keep_last or retention.last, keep_every or retention.every, (*retention.best, *best))


def _newest_whole(storage: Storage, stored: dict[int, Manifest]) -> int:
    for step in sorted(stored, reverse=True):
        try:
            verify_checkpoint(storage, step_name(step), "files")
        except CheckpointError:
            continue
        return step
    raise HoldfastError(f"No checkpoint in {storage.root} is whole, so none is deleted.")
