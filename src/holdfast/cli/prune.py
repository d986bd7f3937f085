"""`holdfast checkpoint prune`: retention by hand, which keeps what the run itself would keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from holdfast.cli.checkpoint_views import writing
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.checkpoint.format.manifest import Manifest
    from holdfast.checkpoint.keep.retention import Retention
    from holdfast.checkpoint.place.storage import Storage


def pruned(
    place: str,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: Sequence[str],
    mode: str | None,
    *,
    dry_run: bool,
) -> Iterator[str]:
    """Delete what is not kept, and yield one line per deleted step."""
    from holdfast.checkpoint.keep import find
    from holdfast.checkpoint.keep.retention import kept_steps, manifests, prune, read_pins
    from holdfast.checkpoint.keep.retention_record import resume_source
    from holdfast.checkpoint.place.object_lease import lease_of

    storage = find.folder_of(place)
    policy, stored = _policy(storage, keep_last, keep_every, keep_best, mode), manifests(storage)
    notes: list[str] = []
    with ExitStack() as stack:
        if not dry_run:
            stack.enter_context(writing(storage))
            stack.enter_context(lease_of(storage))
        source = resume_source(storage)
        needed = [_newest_whole(storage, stored)] + ([] if source is None else [source])
        if dry_run:
            keep = kept_steps(stored, policy, pinned=read_pins(storage), needed=needed)
            doomed = sorted(set(stored) - keep)
        else:
            doomed = prune(storage, policy, needed=needed, notify=notes.append, wait=True)
    for step in doomed:
        yield f"{'would delete' if dry_run else 'deleted'} step {step}"
    yield from notes
    yield f"{len(stored) - len(doomed)} checkpoints {'would stay' if dry_run else 'stay'}"


def _policy(
    storage: Storage, keep_last: int | None, keep_every: int | None, keep_best: Sequence[str], mode: str | None
) -> Retention:
    """Return the run's own retention with what was asked for: numbers replace its numbers, metrics come beside."""
    from holdfast.checkpoint.keep import find
    from holdfast.checkpoint.keep.retention import Best, Retention
    from holdfast.checkpoint.keep.retention_record import better, recorded

    record = recorded(storage)
    own = Retention() if record is None else record.retention
    for metric in keep_best:
        find.best(storage, metric, mode)  # a metric that no checkpoint has would keep nothing
    best = [Best(metric, better(record, metric, mode)) for metric in keep_best]
    return Retention(keep_last or own.last, keep_every or own.every, (*own.best, *best))


def _newest_whole(storage: Storage, stored: dict[int, Manifest]) -> int:
    from holdfast.checkpoint.errors import CheckpointError
    from holdfast.checkpoint.format.verification import verify
    from holdfast.checkpoint.place.layout import step_name

    for step in sorted(stored, reverse=True):
        try:
            verify(storage, step_name(step), "files")
        except CheckpointError:
            continue
        return step
    raise HoldfastError(f"No checkpoint in {storage.root} is whole, so none is deleted.")
