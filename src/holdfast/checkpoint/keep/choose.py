"""Choose the checkpoint that a run resumes from: the newest whose files all have the recorded hashes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from holdfast.checkpoint.errors import (
    CheckpointCorrupt,
    CheckpointUnreadable,
    NoCheckpoint,
    TensorsDiffer,
)
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.verification import named_manifest, patiently, read_manifest, verified_manifest
from holdfast.checkpoint.keep.retention import put_aside, renamed_checkpoints, steps
from holdfast.checkpoint.place.layout import NOT_FINITE, QUARANTINE, fresh
from holdfast.checkpoint.place.storage import Storage
from holdfast.parallel.collectives import RankGroup

T = TypeVar("T")
Inspect = Callable[[str, Manifest], object]
"""Is given a checkpoint's name and manifest."""

_NOT_FINITE = "a tensor in it holds NaN or infinity"
_NEVERTHELESS = (
    "To continue from one that is not finite, give it its name back and set checkpoint.resume.not_finite: true"
)


@dataclass(frozen=True)
class ResumeChoice:
    """The checkpoint from which a run resumes."""

    name: str
    manifest: Manifest
    message: str
    """One line: what was chosen, what was skipped and why."""


def newest_verified(  # noqa: PLR0913 - where one looks, what is done with what is found, and whose it must be
    storage: Storage,
    ranks: RankGroup,
    *,
    quarantine: bool = True,
    not_finite: bool = False,
    check: Inspect = lambda _, __: None,
    use: Inspect,
) -> ResumeChoice | None:
    """Return the newest intact checkpoint, or None if there never was one.

    Rank 0 lists the candidates, since ranks may see a network file system at different times. A candidate that two
    reads find damaged is skipped, and so is one that holds NaN or infinity if there is an older one. A directory
    without a manifest was not written by Holdfast: it is named in the message and left alone.

    Skipped checkpoints are renamed only after the choice has been used. If `use` or `check` raises, nothing is renamed.

    Args:
        storage: Storage of the checkpoints.
        ranks: A separate process group.
        quarantine: Whether to rename skipped checkpoints, so that they are not tried again.
        not_finite: Whether to accept a checkpoint that holds NaN or infinity.
        check: Raises, on rank 0, if a checkpoint that would be renamed belongs to another run.
        use: Loads the choice, whose names and sizes of files have been compared, and verifies its bytes in the same
            pass. All ranks call it together, and it raises on all of them. Where it raises `TensorsDiffer`, or
            `CheckpointCorrupt` and a file is damaged, it is called with the next older candidate.

    Raises:
        CheckpointUnreadable: The directory, or a file of a candidate, cannot be read; the candidate may be intact.
        NoCheckpoint: There were checkpoints and none is intact; to start again at step 0 would lose work silently.
    """
    candidates = list(reversed(_on_rank_0(ranks, storage, lambda: list(steps(storage).items()))))
    passed = _SkippedCheckpoints()
    choice: tuple[str, Manifest] | None = None
    for step, name in candidates:
        manifest = _named(storage, step, name, ranks, passed)
        if manifest is None:
            continue
        is_spoiled = not (manifest.finite or not_finite)
        if not _used(storage, name, manifest, None if is_spoiled else use, ranks, passed):
            continue
        if not is_spoiled:
            choice = name, manifest
            break
        passed.spoiled[step] = name
    if quarantine:
        _check_each(storage, [*passed.damaged, *passed.differing, *passed.spoiled.values()], ranks, check)
        # If no tensors are what was saved, in any checkpoint, it may be this reader that is wrong.
        _quarantine(storage, passed.damaged + (passed.differing if choice is not None else []), ranks)
    if choice is not None:
        skipped = passed.reasons + _pass_over(storage, passed.spoiled, ranks, rename=quarantine)
        skipped += _on_rank_0(ranks, storage, lambda: renamed_checkpoints(storage))
        return ResumeChoice(*choice, _words(choice[1], skipped, passed.spoiled))
    if skipped := passed.all_reasons + _on_rank_0(ranks, storage, lambda: _not_looked_at(storage, passed.all_reasons)):
        raise NoCheckpoint(_none_left(storage, skipped, spoiled=bool(passed.spoiled)))
    return None


@dataclass
class _SkippedCheckpoints:
    """The candidates that were skipped, and why."""

    reasons: list[str] = field(default_factory=list)
    """Sentences about checkpoints that are damaged or not Holdfast's."""
    damaged: list[str] = field(default_factory=list)
    """Names."""
    differing: list[str] = field(default_factory=list)
    """Names of checkpoints whose files have their hashes, and whose tensors differ from those that were saved."""
    spoiled: dict[int, str] = field(default_factory=dict)
    """Names of intact checkpoints that hold NaN or infinity, by step."""

    @property
    def all_reasons(self) -> list[str]:
        """A sentence about each skipped checkpoint."""
        return self.reasons + [f"step {step} ({_NOT_FINITE})" for step in self.spoiled]


def _named(storage: Storage, step: int, name: str, ranks: RankGroup, passed: _SkippedCheckpoints) -> Manifest | None:
    """Return a candidate's manifest; None, and words about it, if its files are others, or it is none of ours."""
    try:
        return named_manifest(storage, name, ranks)
    except (CheckpointCorrupt, NoCheckpoint) as error:
        reason = _reason(storage, name, error)
        ours = isinstance(error, CheckpointCorrupt)
    passed.reasons.append(f"step {step} ({reason}{'' if ours else '; it is left as it is'})")
    if ours:
        passed.damaged.append(name)
    return None


def _used(  # noqa: PLR0913, PLR0917 - what is read, by whom, and where it is told
    storage: Storage,
    name: str,
    manifest: Manifest,
    use: Inspect | None,
    ranks: RankGroup,
    passed: _SkippedCheckpoints,
) -> bool:
    """Return whether a candidate was used, or verified; words about it if its bytes are not what was saved."""
    try:
        if use is None:
            verified_manifest(storage, name, ranks)
        else:
            use(name, manifest)
    except CheckpointCorrupt as error:
        differs = isinstance(error, TensorsDiffer)
        if use is not None and not differs and _is_whole(storage, name, ranks):
            raise
        passed.reasons.append(f"step {manifest.step} ({_reason(storage, name, error)})")
        (passed.differing if differs else passed.damaged).append(name)
        return False
    return True


def _is_whole(storage: Storage, name: str, ranks: RankGroup) -> bool:
    """Return whether all files have their hashes, so that what was refused of them is not damage."""
    try:
        verified_manifest(storage, name, ranks)
    except CheckpointCorrupt:
        return False
    return True


def _reason(storage: Storage, name: str, error: Exception) -> str:
    return str(error).removeprefix(f"{storage.root}/{name}").strip(" /:").rstrip(".")


def _check_each(storage: Storage, names: Sequence[str], ranks: RankGroup, check: Inspect) -> None:
    """Look at what would be put aside, as far as its manifest can be read."""
    with ranks.together():
        for name in names if ranks.rank == 0 else ():
            try:
                manifest = read_manifest(storage, name)
            except (CheckpointCorrupt, NoCheckpoint):
                continue
            check(name, manifest)


def _quarantine(storage: Storage, names: Sequence[str], ranks: RankGroup) -> None:
    for name in names:
        ranks.on_first_rank(partial(_put_aside, storage, name, fresh(QUARANTINE, name)))


def _none_left(storage: Storage, skipped: Sequence[str], *, spoiled: bool) -> str:
    good = "To continue from it all the same, set checkpoint.resume.not_finite: true. " if spoiled else ""
    return (
        f"{storage.root} has no {'finite' if spoiled else 'whole'} checkpoint left: {'; '.join(skipped)}. {good}To "
        "start again from step 0, choose another run.name."
    )


def _words(manifest: Manifest, skipped: Sequence[str], spoiled: Mapping[int, str]) -> str:
    message = f"resuming from step {manifest.step}, verified in {len(manifest.files)} files"
    message += "" if manifest.finite else f"; {_NOT_FINITE}"
    message += f"; skipped {', '.join(skipped)}" if skipped else ""
    return message + (f". {_NEVERTHELESS}" if spoiled else "")


def _pass_over(storage: Storage, spoiled: Mapping[int, str], ranks: RankGroup, *, rename: bool) -> list[str]:
    """Put aside what is whole and not finite, as the run will come to these steps again; return words about each."""
    reasons = []
    for step, name in spoiled.items():
        reason = _NOT_FINITE
        if rename:
            aside = ranks.agree(fresh(NOT_FINITE, name))
            ranks.on_first_rank(partial(_put_aside, storage, name, aside))
            reason += f"; it was put aside as {aside}"
        reasons.append(f"step {step} ({reason})")
    return reasons


def _on_rank_0(ranks: RankGroup, storage: Storage, ask: Callable[[], list[T]]) -> list[T]:
    """Return rank 0's answer, or raise its error on every rank."""
    return ranks.on_first_rank(lambda: patiently(storage.root, ask))


def _put_aside(storage: Storage, name: str, aside: str) -> None:
    try:
        put_aside(storage, name, aside)
    except OSError as error:
        raise CheckpointUnreadable(
            f"{storage.root}/{name} is no good and cannot be put aside: {error.strerror or error}. Rename it "
            "yourself, or mend the permissions of its directory."
        ) from error


def _not_looked_at(storage: Storage, passed: Sequence[str]) -> list[str]:
    return renamed_checkpoints(storage) + ([] if passed else _earlier(storage))


def _earlier(storage: Storage) -> list[str]:
    """Return words about checkpoints that an earlier start found damaged or not finite."""
    not_finite = [name.startswith(NOT_FINITE) for name in storage.names() if name.startswith(QUARANTINE)]
    counts = {"damaged": not_finite.count(False), "not finite": not_finite.count(True)}
    return [f"{count} were {fault} and put aside earlier" for fault, count in counts.items() if count]
