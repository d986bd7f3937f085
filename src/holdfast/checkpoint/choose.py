"""Which checkpoint a run resumes from: the newest whose every file is what was written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from holdfast.checkpoint.errors import CheckpointCorrupt, CheckpointUnreadable, NoCheckpoint
from holdfast.checkpoint.layout import NOT_FINITE, QUARANTINE, fresh
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.reader import verified_manifest
from holdfast.checkpoint.retention import put_aside, steps
from holdfast.checkpoint.storage import Storage
from holdfast.checkpoint.verification import patiently
from holdfast.parallel.collectives import ProcessExchange

T = TypeVar("T")

_NOT_FINITE = "a tensor in it holds NaN or infinity"
_NEVERTHELESS = (
    "To continue from one that is not finite, give it its name back and set checkpoint.resume.not_finite: true"
)


@dataclass(frozen=True)
class Choice:
    """What a run continues from."""

    name: str
    manifest: Manifest
    words: str
    """One line: what was chosen, what was skipped and why."""


def newest_verified(
    storage: Storage, ranks: ProcessExchange, *, quarantine: bool = True, not_finite: bool = False
) -> Choice | None:
    """Return the newest whole checkpoint, or None if there never was one.

    Rank 0 lists, since ranks may see a network file system at different times. A candidate that two reads agree is
    damaged is put aside, and the next older one is tried. So is one with NaN or infinity in it, once an
    older one was found. What has no manifest is none of ours: it is passed over, named, and left where it is.

    Args:
        storage: Where checkpoints are.
        ranks: A group of its own.
        quarantine: Put aside what is skipped.
        not_finite: Take one with NaN or infinity in it too.

    Raises:
        CheckpointUnreadable: The directory, or a file of a candidate, cannot be read: it may be whole.
        NoCheckpoint: There were checkpoints and none is good: starting again at step 0 would be a silent loss.
    """
    candidates = list(reversed(_on_rank_0(ranks, storage, lambda: list(steps(storage).items()))))
    skipped: list[str] = []
    spoiled: dict[int, str] = {}
    for step, name in candidates:
        manifest = _verified(storage, step, name, ranks, skipped, rename=quarantine)
        if manifest is None:
            continue
        if not manifest.finite and not not_finite:
            spoiled[step] = name
            continue
        skipped += _pass_over(storage, spoiled, ranks, rename=quarantine)
        return Choice(name, manifest, _words(step, manifest, skipped, spoiled))
    skipped += [f"step {step} ({_NOT_FINITE})" for step in spoiled]
    skipped = skipped or _on_rank_0(ranks, storage, lambda: _earlier(storage))
    if skipped:
        good = "To continue from it all the same, set checkpoint.resume.not_finite: true. " if spoiled else ""
        raise NoCheckpoint(
            f"{storage.root} has no {'finite' if spoiled else 'whole'} checkpoint left: {'; '.join(skipped)}. {good}To "
            "start again from step 0, choose another run.name."
        )
    return None


def _verified(
    storage: Storage, step: int, name: str, ranks: ProcessExchange, skipped: list[str], *, rename: bool
) -> Manifest | None:
    """Return a candidate's manifest; None, and words among the skipped, if it is damaged or none of ours."""
    try:
        return verified_manifest(storage, name, ranks)
    except (CheckpointCorrupt, NoCheckpoint) as error:
        reason = str(error).removeprefix(f"{storage.root}/{name}").strip(" /:").rstrip(".")
        ours = isinstance(error, CheckpointCorrupt)
    skipped.append(f"step {step} ({reason}{'' if ours else '; it is left as it is'})")
    if rename and ours:
        _put_aside(storage, name, fresh(QUARANTINE, name), ranks)
    return None


def _words(step: int, manifest: Manifest, skipped: Sequence[str], spoiled: Mapping[int, str]) -> str:
    words = f"resuming from step {step}, verified in {len(manifest.files)} files"
    words += "" if manifest.finite else f"; {_NOT_FINITE}"
    words += f"; skipped {', '.join(skipped)}" if skipped else ""
    return words + (f". {_NEVERTHELESS}" if spoiled else "")


def _pass_over(storage: Storage, spoiled: Mapping[int, str], ranks: ProcessExchange, *, rename: bool) -> list[str]:
    """Put aside what is whole and not finite, as the run will come to these steps again; return words about each."""
    words = []
    for step, name in spoiled.items():
        told = _NOT_FINITE
        if rename:
            aside = ranks.agree(fresh(NOT_FINITE, name))
            _put_aside(storage, name, aside, ranks)
            told += f"; it was put aside as {aside}"
        words.append(f"step {step} ({told})")
    return words


def _on_rank_0(ranks: ProcessExchange, storage: Storage, ask: Callable[[], list[T]]) -> list[T]:
    """Return rank 0's answer, or raise on every rank what keeps it from one."""
    found: list[T] = []
    with ranks.together():
        if ranks.rank == 0:
            found += patiently(storage.root, ask)
    return ranks.agree(found)


def _put_aside(storage: Storage, name: str, aside: str, ranks: ProcessExchange) -> None:
    with ranks.together():
        if ranks.rank == 0:
            try:
                put_aside(storage, name, aside)
            except OSError as error:
                raise CheckpointUnreadable(
                    f"{storage.root}/{name} is no good and cannot be put aside: {error.strerror or error}. Rename it "
                    "yourself, or mend the permissions of its directory."
                ) from error


def _earlier(storage: Storage) -> list[str]:
    """Return words about checkpoints that an earlier start found damaged or not finite."""
    found = [name.startswith(NOT_FINITE) for name in storage.names() if name.startswith(QUARANTINE)]
    counts = {"damaged": found.count(False), "not finite": found.count(True)}
    return [f"{count} were {what} and put aside earlier" for what, count in counts.items() if count]
