"""Delete checkpoints that the retention rules do not keep, only after a newer checkpoint was committed and verified."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

from holdfast.checkpoint.errors import CheckpointCorrupt, DirectoryTaken
from holdfast.checkpoint.format.manifest import NAME, Manifest, OtherFormat, parse
from holdfast.checkpoint.place.hashing import hash_bytes
from holdfast.checkpoint.place.layout import (
    PINS,
    QUARANTINE,
    REHEARSAL,
    STAGING,
    TRASH,
    fresh,
    lease_turns,
    renamed,
    staged_name,
    step_name,
    step_of,
)
from holdfast.checkpoint.place.lease import Lease
from holdfast.checkpoint.place.storage import Storage
from holdfast.errors import ConfigError
from holdfast.files import NotRegular, parse_json


@dataclass(frozen=True)
class BestRule:
    """Keep the best checkpoints by a metric of their own step."""

    metric: str
    mode: Literal["max", "min"]
    count: int = 1


@dataclass(frozen=True)
class Retention:
    """Rules for which checkpoints are kept; all others are deleted."""

    last: int = 3
    """Number of newest checkpoints to keep; at least 2, since the newest may be damaged on its way to the disk."""
    every: int | None = None
    """Checkpoints whose step is a multiple of this are kept for good."""
    best: Sequence[BestRule] = ()


class CheckpointRating(NamedTuple):
    """The values of a checkpoint that retention rules read."""

    finite: bool
    metrics: Mapping[str, float | None]


_DELETING = "holdfast-delete"
"""Name of the threads that delete checkpoints."""

_rated: dict[str, CheckpointRating] = {}
"""Cache of ratings by the hash of a manifest's bytes; parsing all kept manifests at every save would grow slower."""


def kept_steps(
    checkpoints: Mapping[int, Manifest | CheckpointRating],
    policy: Retention,
    *,
    pinned: Iterable[int] = (),
    needed: Iterable[int] = (),
) -> set[int]:
    """Return the steps that stay.

    Args:
        checkpoints: Whole ones by step; damaged ones are not here and count for nothing.
        policy: The rules.
        pinned: Kept by the user.
        needed: The step a run resumed from, and the newest verified one.

    A checkpoint with NaN or infinity in it counts neither among the last nor among the best. Of equal metrics the
    later step wins.
    """
    healthy = [step for step in sorted(checkpoints) if checkpoints[step].finite]
    keep = set(healthy[-policy.last :]) | ({*pinned, *needed} & set(checkpoints))
    if policy.every is not None:
        keep |= {step for step in checkpoints if step % policy.every == 0}
    for best in policy.best:
        rated = [(value, step) for step in healthy if (value := checkpoints[step].metrics.get(best.metric)) is not None]
        sign = 1.0 if best.mode == "max" else -1.0
        keep |= {step for _, step in sorted(rated, key=lambda pair: (sign * pair[0], pair[1]))[-best.count :]}
    return keep


def steps(storage: Storage) -> dict[int, str]:
    """Return what is named like a checkpoint, by step, oldest first.

    A name without a manifest was not saved by Holdfast, or lost it; it is returned so that it can be named.
    """
    return dict(sorted((step, name) for name in all_steps(storage) if (step := step_of(name)) is not None))


def has_any(storage: Storage) -> bool:
    """Return whether there are checkpoints, or were until they were found damaged or got another name."""
    return (
        bool(steps(storage))
        or any(name.startswith(QUARANTINE) for name in storage.names())
        or bool(renamed_checkpoints(storage))
    )


def renamed_checkpoints(storage: Storage) -> list[str]:
    """Return words about each checkpoint that nobody looks at, since its name is not the one of its step."""
    messages = []
    for name in storage.names():
        if renamed(name) and storage.exists(f"{name}/{NAME}"):
            try:
                right = step_name(parse(storage.read(f"{name}/{NAME}"), name).step)
            except (OSError, CheckpointCorrupt, OtherFormat):
                right = "step- and eight digits"
            messages.append(f"{name} is passed over: it has the name of no checkpoint; rename it to {right}")
    return messages


def has_own(storage: Storage) -> bool:
    """Return whether something here has a manifest, whole or not, and so was written by us."""
    return any(storage.exists(f"{name}/{NAME}") for name in reversed(all_steps(storage)))


def all_steps(storage: Storage) -> list[str]:
    """Return every name of a step, whatever is in it."""
    return [name for name in storage.names() if step_of(name) is not None]


def manifests(storage: Storage) -> dict[int, Manifest]:
    """Return the manifests of all checkpoints whose manifest is whole and of a format that this version knows."""
    by_step = {}
    for step, name in steps(storage).items():
        try:
            by_step[step] = parse(storage.read(f"{name}/{NAME}"), f"{storage.root}/{name}/{NAME}")
        except (OSError, CheckpointCorrupt, OtherFormat):
            continue
    return by_step


def _all_rated(storage: Storage) -> dict[int, CheckpointRating]:
    """Return what the rules ask, of the checkpoints that `manifests` returns."""
    by_step = {}
    for step, name in steps(storage).items():
        path = f"{name}/{NAME}"
        try:
            data = storage.read(path)
            digest = hash_bytes(data)
            if digest not in _rated:
                manifest = parse(data, f"{storage.root}/{path}")
                _rated[digest] = CheckpointRating(manifest.finite, manifest.metrics)
        except (OSError, CheckpointCorrupt, OtherFormat):
            continue
        by_step[step] = _rated[digest]
    return by_step


def read_pins(storage: Storage) -> set[int]:
    """Return the steps the user keeps."""
    if not storage.exists(PINS):
        return set()
    try:
        return {int(step) for step in parse_json(storage.read(PINS))}
    except (ValueError, TypeError, NotRegular) as error:
        raise CheckpointCorrupt(
            f"{storage.root}/{PINS} is damaged ({error}). Delete it, then pin again with `holdfast checkpoint pin`."
        ) from error


def write_pins(storage: Storage, pinned: Iterable[int]) -> None:
    """Replace the list of pinned steps."""
    storage.replace(PINS, json.dumps(sorted(pinned)).encode())


def replaceable(storage: Storage, policy: Retention, *, needed: Iterable[int] = ()) -> int:
    """Return how many checkpoints will give way to newer ones: all but those that the rules keep for good.

    Args:
        storage: The checkpoints.
        policy: The rules.
        needed: As in `kept_steps`.
    """
    staying = read_pins(storage) | {*needed}
    every = policy.every
    return sum(step not in staying and (every is None or step % every != 0) for step in _all_rated(storage))


def apply_retention(
    storage: Storage,
    policy: Retention,
    *,
    needed: Iterable[int] = (),
    notify: Callable[[str], None] = lambda _: None,
    wait: bool = False,
) -> list[int]:
    """Delete what the policy does not keep, and return the deleted steps.

    Args:
        storage: The checkpoints.
        policy: The rules.
        needed: As in `kept_steps`.
        notify: Told of each step that cannot be deleted; the others are deleted all the same.
        wait: Return when the files are gone.

    Each is renamed before it is deleted, so that nobody sees half a checkpoint; files go on a thread of their own.
    """
    rated = _all_rated(storage)
    keep = kept_steps(rated, policy, pinned=read_pins(storage), needed=needed)
    trash = {}
    for step in rated:
        if step in keep:
            continue
        try:
            trash[step] = _thrown_away(storage, step_name(step))
        except OSError as error:
            notify(f"{step_name(step)} could not be deleted: {error}. The next save tries again.")
    _delete(storage, list(trash.values()), wait=wait)
    return list(trash)


def _thrown_away(storage: Storage, name: str) -> str:
    """End a checkpoint, and return the name that its files have now."""
    gone = fresh(TRASH, name)
    storage.rename(name, gone)
    return gone


def put_aside(storage: Storage, name: str, aside: str | None = None) -> None:
    """Take a checkpoint out of the way of the next save of its step, and keep its files for whoever looks.

    Args:
        storage: Where it is.
        name: The checkpoint.
        aside: Its new name; default: a fresh one of a damaged checkpoint.
    """
    storage.rename(name, aside or fresh(QUARANTINE, name))
    storage.sync("")  # else a power cut could keep the next checkpoint of this name and not this rename


@contextmanager
def changing(storage: Storage) -> Iterator[None]:
    """Raise a `ConfigError` where a place of checkpoints does not answer, or does not take a change."""
    try:
        yield
    except NotRegular:
        raise
    except OSError as error:
        raise ConfigError(
            f"{storage.root}, where this run's checkpoints are, cannot be changed: {error.strerror or error}. What was "
            "saved is there. Mend its permissions, its disk or its network, and start the same command again."
        ) from error


def remove_leftovers(storage: Storage, *, wait: bool = False) -> None:
    """Remove what was left half written or half deleted; the caller holds the lease of the place.

    A save of own code that is under way, or a rehearsal, holds a lease of its name and is left alone.
    """
    leftovers = {name: staged_name(name) or name for name in storage.names() if name.startswith((STAGING, REHEARSAL))}
    names = storage.names()  # later: a save takes its lease before it makes its staging directory
    held = set(lease_turns(names)) - {""}
    for saved in sorted(held):
        with suppress(DirectoryTaken), Lease(storage, saved):
            held.discard(saved)  # its save was killed
    removed = [name for name in names if name.startswith(TRASH)]
    _delete(storage, removed + [name for name, saved in leftovers.items() if saved not in held], wait=wait)


def _delete(storage: Storage, names: Sequence[str], *, wait: bool) -> None:
    if not names:
        return

    def work() -> None:
        for name in names:
            with suppress(OSError):  # the next start clears it away
                storage.remove(name)

    # A daemon: a file system that hangs in a deletion must not keep the process from ending.
    thread = threading.Thread(target=work, name=_DELETING, daemon=True)
    thread.start()
    if wait:
        thread.join()


def wait_for_deletions(seconds: float) -> None:
    """Let deletions end, for so long: their threads end with the process, and nobody may ever start the run again."""
    deadline = time.monotonic() + seconds
    for thread in threading.enumerate():
        if thread.name == _DELETING:
            thread.join(max(0.0, deadline - time.monotonic()))
