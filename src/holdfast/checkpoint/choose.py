"""Which checkpoint a run resumes from: the newest whose every file is what was written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from holdfast.checkpoint.errors import CheckpointCorrupt, CheckpointUnreadable, NoCheckpoint
from holdfast.checkpoint.layout import QUARANTINE, fresh
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.reader import verified_manifest
from holdfast.checkpoint.retention import steps
from holdfast.checkpoint.storage import Storage
from holdfast.checkpoint.verification import patiently
from holdfast.parallel.collectives import ProcessExchange

T = TypeVar("T")


@dataclass(frozen=True)
class Choice:
    """What a run continues from."""

    name: str
    manifest: Manifest
    words: str
    """One line: what was chosen, what was skipped and why."""


def newest_verified(storage: Storage, ranks: ProcessExchange, *, quarantine: bool = True) -> Choice | None:
    """Return the newest whole checkpoint, or None if there never was one.

    Rank 0 lists, since ranks may see a network file system at different times. A candidate that two reads agree is
    damaged is renamed out of the way, and the next older one is tried.

    Raises:
        CheckpointUnreadable: The directory, or a file of a candidate, cannot be read: it may be whole.
        NoCheckpoint: There were checkpoints and none is whole: starting again at step 0 would be a silent loss.
    """
    candidates = list(reversed(_on_rank_0(ranks, storage, lambda: list(steps(storage).items()))))
    skipped: list[str] = []
    for step, name in candidates:
        try:
            manifest = verified_manifest(storage, name, ranks)
        except (CheckpointCorrupt, NoCheckpoint) as error:
            reason = str(error).removeprefix(f"{storage.root}/{name}").strip(" /:").rstrip(".")
            skipped.append(f"step {step} ({reason})")
            if quarantine and storage.renames:
                _put_aside(storage, name, ranks)
            continue
        words = f"resuming from step {step}, verified in {len(manifest.files)} files"
        if skipped:
            words += f"; skipped {', '.join(skipped)}"
        return Choice(name, manifest, words)
    skipped = skipped or _on_rank_0(ranks, storage, lambda: _earlier(storage))
    if skipped:
        raise NoCheckpoint(
            f"{storage.root} has no whole checkpoint left: {'; '.join(skipped)}. To start again from step 0, choose "
            "another run.name."
        )
    return None


def _on_rank_0(ranks: ProcessExchange, storage: Storage, ask: Callable[[], list[T]]) -> list[T]:
    """Return rank 0's answer, or raise on every rank what keeps it from one."""
    found: list[T] = []
    with ranks.together():
        if ranks.rank == 0:
            found += patiently(storage.root, ask)
    return ranks.agree(found)


def _put_aside(storage: Storage, name: str, ranks: ProcessExchange) -> None:
    with ranks.together():
        if ranks.rank == 0:
            try:
                storage.rename(name, fresh(QUARANTINE, name))
            except OSError as error:
                raise CheckpointUnreadable(
                    f"{storage.root}/{name} is damaged and cannot be put aside: {error.strerror or error}. Rename it "
                    "yourself, or mend the permissions of its directory."
                ) from error


def _earlier(storage: Storage) -> list[str]:
    """Return words about checkpoints that an earlier start found damaged."""
    found = [name for name in storage.names() if name.startswith(QUARANTINE)]
    return [f"{len(found)} were damaged and put aside earlier"] if found else []
