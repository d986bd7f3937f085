"""Which checkpoint a run resumes from: the newest whose every file is what was written."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.checkpoint.errors import CheckpointCorrupt, NoCheckpoint
from holdfast.checkpoint.layout import QUARANTINE
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.reader import verified_manifest
from holdfast.checkpoint.retention import put_aside, steps
from holdfast.checkpoint.storage import Storage
from holdfast.parallel.collectives import ProcessExchange


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
    damaged is put aside, and the next older one is tried.

    Raises:
        NoCheckpoint: There were checkpoints and none is whole: starting again at step 0 would be a silent loss.
    """
    candidates = ranks.agree(list(reversed(steps(storage).items())) if ranks.rank == 0 else [])
    skipped: list[str] = []
    for step, name in candidates:
        try:
            manifest = verified_manifest(storage, name, ranks)
        except (CheckpointCorrupt, NoCheckpoint) as error:
            reason = str(error).removeprefix(f"{storage.root}/{name}").strip(" /:").rstrip(".")
            skipped.append(f"step {step} ({reason})")
            if quarantine:
                with ranks.together():
                    if ranks.rank == 0:
                        put_aside(storage, name)
            continue
        words = f"resuming from step {step}, verified in {len(manifest.files)} files"
        if skipped:
            words += f"; skipped {', '.join(skipped)}"
        return Choice(name, manifest, words)
    skipped = skipped or ranks.agree(_earlier(storage) if ranks.rank == 0 else [])
    if skipped:
        raise NoCheckpoint(
            f"{storage.root} has no whole checkpoint left: {'; '.join(skipped)}. To start again from step 0, choose "
            "another run.name."
        )
    return None


def _earlier(storage: Storage) -> list[str]:
    """Return words about checkpoints that an earlier start found damaged."""
    found = [name for name in storage.names() if name.startswith(QUARANTINE)]
    return [f"{len(found)} were damaged and put aside earlier"] if found else []
