"""Faults that are no crash: at each operation of a storage an error or wrong bytes, once or for good, in each verb.

A verb of the shipped code runs on a storage in memory. It ends well, or with an error of Holdfast; what it told before
and after is then judged by the promises that hold after a crash (`crash_states.py`), once the storage works again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.checkpoint.format.verification import verify_checkpoint
from holdfast.checkpoint.keep.retention import changing, steps
from holdfast.checkpoint.place.hashing import HashingWriter
from holdfast.checkpoint.place.layout import QUARANTINE, step_name
from holdfast.errors import HoldfastError
from tests.checkpoint.crash_states import (
    Job,
    Judge,
    Lost,
    Store,
    _recording,
    damaged_newest,
    files_of,
    saves,
    went_back,
)
from tests.checkpoint.recording_stores import Bucket, Disk, Requests

FOR_GOOD = 10**9


class Fault(NamedTuple):
    """What goes wrong at an operation and at so many after it."""

    number: int | None
    """The system's error; None: the bytes that are read have a flipped bit, another one at each read."""
    times: int

    def __str__(self) -> str:
        """Return a name, such as "EIO once"."""
        name = "wrong bytes" if self.number is None else errno.errorcode[self.number]
        return f"{name}, {'for good' if self.times == FOR_GOOD else self.times}"


FAULTS = [
    Fault(number, times)
    for number in (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES, None)
    for times in (1, 2, FOR_GOOD)
]


@dataclass
class Trouble:
    """Counts operations, and says at which a fault happens."""

    fault: Fault = Fault(None, 0)
    first: int = 0
    operations: int = 0

    def happens(self) -> bool:
        """Count an operation; return whether it goes wrong."""
        self.operations += 1
        return self.first <= self.operations - 1 < self.first + self.fault.times

    def strike(self) -> None:
        """Raise the error of an operation that goes wrong."""
        if self.happens() and self.fault.number is not None:
            raise OSError(self.fault.number, os.strerror(self.fault.number))

    def bytes_of(self, data: bytes) -> bytes:
        """Return what is read, or is written, of some bytes."""
        wrong = self.fault.number is None and self.first <= self.operations - 1 < self.first + self.fault.times
        if not wrong or not data:
            return data
        place = self.operations * 7919 % len(data)
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


class TroubledDisk(Disk):
    """A disk in trouble; an operation is what one call of the storage asks, and the last write of a file."""

    trouble = Trouble()

    @contextmanager
    def create(self, path: str, *, sync: bool = True) -> Iterator[HashingWriter]:
        with super().create(path, sync=sync) as writer:
            yield writer
            self.turn()

    def sync_file(self, number: int) -> None:
        self.turn()
        super().sync_file(number)

    def read(self, path: str) -> bytes:
        return self.trouble.bytes_of(super().read(path))


class TroubledRequests(Requests):
    """Requests to a bucket in trouble."""

    def get(self, name: str) -> bytes:
        data = super().get(name)
        return self.recording.trouble.bytes_of(data) if isinstance(self.recording, TroubledBucket) else data


class TroubledBucket(Bucket):
    """A bucket in trouble: requests that fail were not carried out."""

    requests = TroubledRequests
    trouble = Trouble()


def resume(job: Job) -> None:
    with changing(job.store):
        job.resume()


def save(job: Job) -> None:
    job.save(max(job.told.saved, default=0) + 1)


def verify(job: Job) -> None:
    for step in job.told.saved:
        verify_checkpoint(job.store, step_name(step))


def go_back(job: Job) -> None:
    with changing(job.store):
        went_back(job)


class Verb(NamedTuple):
    """What was done long ago, and what is done in trouble."""

    before: Callable[[Job], None]
    act: Callable[[Job], None]


VERBS = {
    "save": Verb(saves(1, 2), save),
    "first save": Verb(saves(), save),
    "resume": Verb(saves(1, 2), resume),
    "resume over a damaged one": Verb(damaged_newest, resume),
    "verify": Verb(saves(1, 2), verify),
    "go back": Verb(saves(1, 2), go_back),
}


class Case(NamedTuple):
    """A verb, a fault, and the operation at which it begins."""

    verb: str
    fault: Fault
    first: int


class Table:
    """All cases of one kind of storage."""

    def __init__(self, kind: type[Store]) -> None:
        self._kind: Any = TroubledBucket if issubclass(kind, Bucket) else TroubledDisk
        self._honest: Any = kind
        self._before: dict[str, tuple[Any, Job]] = {}

    def _prepared(self, verb: str) -> tuple[Any, Job]:
        if verb not in self._before:
            earlier = Job(self._honest())
            VERBS[verb].before(earlier)
            store = earlier.store
            self._before[verb] = (store.contents if isinstance(store, Bucket) else store.tree), earlier
        return self._before[verb]

    def operations(self, verb: str) -> int:
        """Return how many operations a verb has where nothing goes wrong."""
        return self._run(Case(verb, Fault(None, 0), 0))[1].operations

    def _run(self, case: Case) -> tuple[Job, Trouble, BaseException | None]:
        base, earlier = self._prepared(case.verb)
        store = self._kind(base.copy())
        job = Job(store, earlier.told)
        trouble = store.trouble = Trouble(case.fault, case.first)
        store.turn = trouble.strike
        error: BaseException | None = None
        try:
            VERBS[case.verb].act(job)
        except Exception as caught:  # noqa: BLE001 - judged by the caller
            error = caught
        finally:
            store.turn = lambda: None
            store.trouble = Trouble()
        return job, trouble, error

    def fault(self, case: Case) -> str | None:
        """Return which promise does not hold in a case; None if all do."""
        base, earlier = self._prepared(case.verb)
        job, _, error = self._run(case)
        if error is not None and not isinstance(error, HoldfastError):
            return f"it ended with {error!r}"
        store: Any = job.store
        aside = [name for name in store.names() if name.startswith(QUARANTINE)]
        expected = len(earlier.told.aside) if case.verb == "resume over a damaged one" else 0
        if len(aside) > expected:
            return f"{aside} were put aside, and {expected} of them were damaged"
        known = {step: [files] for step, files in earlier.told.saved.items()}
        for step, name in steps(store).items():  # published, and then not reported: the read-back had no answer
            with suppress(HoldfastError):
                verify_checkpoint(store, name)
                known.setdefault(step, []).append(files_of(store, name))
        judge = Judge(_recording(base, job, known, earlier.told))
        honest = self._honest(store.contents if isinstance(store, Bucket) else store.tree)
        try:
            judge._go_on(honest, job.told, in_order=True)
        except Lost as lost:
            return f"{lost}, after {error!r}" if error is not None else str(lost)
        return None

    def cases(self, verb: str) -> Iterator[Case]:
        """Yield every case of a verb."""
        for fault in FAULTS:
            for first in range(self.operations(verb)):
                yield Case(verb, fault, first)
