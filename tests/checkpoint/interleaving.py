"""Jobs that take turns at each operation of a storage, in an order and with a clock that a seed decides."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, cast

from holdfast.checkpoint.errors import CheckpointError, DirectoryTaken, PlaceLost
from holdfast.checkpoint.format.manifest import NAME, About, parse
from holdfast.checkpoint.keep.retention import Retention, remove_leftovers
from holdfast.checkpoint.place.hashing import hash_bytes
from holdfast.checkpoint.place.layout import step_name
from holdfast.checkpoint.place.lease import Lease
from holdfast.checkpoint.saving.writer import commit
from holdfast.checkpoint.session import Session
from tests.checkpoint.cases import newest_whole
from tests.checkpoint.crash_states import RANKS, Files, Store, files_of, snapshot_of
from tests.checkpoint.recording_stores import Bucket, Contents, Disk, Tree

FROZEN_SECONDS = (100.0, 1500.0)
"""How long a job is suspended, with its lease: from less than a lease lasts to more than the other job's saves do."""
RENEW_SECONDS = 15.0
RETRY_SECONDS = 60.0
TRAIN_SECONDS = 50.0
"""From save to save."""
STEPS = 2
"""Saves of a job."""


class Stopped(BaseException):
    """Ends a thread whose scheduler has given up."""


@dataclass(eq=False)
class Task:
    """A thread that runs only when its scheduler says so."""

    job: str
    act: Callable[[], None]
    wakes: float = 0.0
    """Time before which it does not go on."""
    is_done: bool = False
    is_daemon: bool = False
    """Whether the others do not wait for its end."""
    error: BaseException | None = None
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class Scheduler:
    """Lets one task at a time make one operation; `seed` decides which, when the clock moves, and who is suspended.

    Args:
        seed: Of all decisions.
        freezes: Operations, counted by job, before which a job is suspended.
    """

    def __init__(self, seed: int, freezes: Collection[tuple[str, int]] = ()) -> None:
        self._random = random.Random(seed)
        self._freezes = frozenset(freezes)
        self.made: Counter[str] = Counter()
        self._back = threading.Semaphore(0)
        self._tasks: list[Task] = []
        self._by_thread: dict[int, Task] = {}
        self._main: dict[str, Task] = {}
        self._thaws: dict[str, float] = {}
        self._stopped = False
        self.seconds = 0.0

    def add(self, job: str, act: Callable[[], None], *, is_daemon: bool = False) -> Task:
        """Start a task of a job; it waits for its turn."""
        task = Task(job, act, is_daemon=is_daemon)

        def work() -> None:
            self._by_thread[threading.get_ident()] = task
            task.go.acquire()
            try:
                if not self._stopped:
                    act()
            except Stopped:
                pass
            except BaseException as error:  # noqa: BLE001 - the edge of a thread
                task.error = error
            del self._by_thread[threading.get_ident()]
            task.is_done = True
            self._back.release()

        self._tasks.append(task)
        if not is_daemon:
            self._main[job] = task
        threading.Thread(target=work, daemon=True).start()
        return task

    def turn(self, job: str) -> None:
        """Wait for the next turn; threads that a job starts itself take the turns of its main task."""
        task = self._by_thread.get(threading.get_ident(), self._main[job])
        self.made[job] += 1
        if (job, self.made[job]) in self._freezes:
            self._thaws[job] = self.seconds + self._random.uniform(*FROZEN_SECONDS)
        self._back.release()
        task.go.acquire()
        if self._stopped:
            raise Stopped

    def sleep(self, job: str, seconds: float) -> None:
        """Wait for the clock."""
        task = self._by_thread.get(threading.get_ident(), self._main[job])
        task.wakes = self.seconds + seconds
        self.turn(job)

    def run(self, most: int = 20_000) -> None:
        """Run until all tasks have ended that are no daemons; raise the first error of one."""
        while not all(task.is_done or task.is_daemon for task in self._tasks):
            assert self.made.total() < most, "the jobs do not come to an end"
            self.seconds += self._random.choice((0.0, 0.1, 1.0, 5.0))
            ready = [task for task in self._tasks if not task.is_done and self._wakes(task) <= self.seconds]
            if not ready:
                waiting = [self._wakes(task) for task in self._tasks if not task.is_done]
                self.seconds = min(waiting)
                continue
            self._random.choice(ready).go.release()
            self._back.acquire()
        self._stopped = True
        for task in self._tasks:
            if not task.is_done:
                task.go.release()
                self._back.acquire()
        for task in self._tasks:
            if task.error is not None:
                raise task.error

    def _wakes(self, task: Task) -> float:
        return max(task.wakes, self._thaws.get(task.job, 0.0))


class SteppedLock:
    """A lock between tasks of one job, of which one that waits takes turns."""

    def __init__(self, scheduler: Scheduler, job: str) -> None:
        self._scheduler, self._job, self._is_held = scheduler, job, False

    def __enter__(self) -> None:
        while self._is_held:
            self._scheduler.turn(self._job)
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False


class SteppedLease(Lease):
    """A lease of a job on a machine of its own, renewed by a task of the scheduler."""

    scheduler: Scheduler
    job: str
    renews = True

    def __init__(self, storage: Store) -> None:
        super().__init__(storage)
        self._writing: Any = SteppedLock(self.scheduler, self.job)

    def _text(self) -> bytes:
        return json.dumps(json.loads(super()._text()) | {"machine": [self.job]}).encode().ljust(512)

    def _begin(self) -> None:
        self._is_renewing = self._is_over = False
        self.scheduler.add(self.job, self._renew_by_the_clock, is_daemon=True)

    def _renew_by_the_clock(self) -> None:
        while self.renews:
            self.scheduler.sleep(self.job, RENEW_SECONDS)
            if self._is_over:
                return
            self._is_renewing = True
            with suppress(OSError):  # as the shipped thread has it
                self._renew()
            self._is_renewing = False

    def __exit__(self, *_: Any) -> None:
        self._is_over = True
        while self._is_renewing:
            self.scheduler.turn(self.job)
        self._give_back()


class GivenBackTooEarly(SteppedLease):
    """A lease that ends when it was taken."""

    def _begin(self) -> None:
        super()._begin()
        self.__exit__()

    def check(self) -> None:
        pass


class NeverRenewed(SteppedLease):
    """A lease that nobody renews, and whose holder does not look whether it is still its own."""

    renews = False

    def check(self) -> None:
        pass


@dataclass
class Outcome:
    """What the jobs have reported, and what came of it."""

    saved: list[tuple[int, int]] = field(default_factory=list)
    """Number of the job, and step."""
    failed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """What was reported and is not there as that job saved it."""
    operations: Counter[str] = field(default_factory=Counter)

    def look(self, store: Store) -> None:
        """Compare what is there with what was reported."""
        for job, step in self.saved:
            files = dict(files_of(store, step_name(step)))
            listed = parse(files.pop(NAME), "").files if NAME in files else {}
            whole = {path: hash_bytes(data) for path, data in files.items()} == {
                path: entry.hash for path, entry in listed.items()
            }
            own = _alone(job, step)
            if not whole or {path: data for path, data in files.items() if path in own} != own:
                self.lost.append(f"job {job}: step {step}")


@cache
def _alone(job: int, step: int) -> Files:
    """Return the files of a save that nobody disturbs, but for the manifest, which has a time in it."""
    store = Disk()
    commit(snapshot_of(step, job), store, About("run", step, None, None), RANKS)
    return {path: data for path, data in files_of(store, step_name(step)).items() if path != NAME}


def jobs_in(
    kind: type[Store],
    seed: int,
    freezes: Collection[tuple[str, int]] = (),
    *,
    lease: type[SteppedLease] = SteppedLease,
) -> Outcome:
    """Let two jobs resume and save in one place; return what they reported and lost."""
    scheduler, outcome = Scheduler(seed, freezes), Outcome()
    place: Any = Contents() if issubclass(kind, Bucket) else Tree()

    def client(job: str, number: int) -> Store:
        store: Any = kind(place) if issubclass(kind, Bucket) else kind(place, first=1 + number * 100_000)

        def turn() -> None:
            scheduler.turn(job)
            place.seconds = scheduler.seconds

        store.turn = turn
        return cast("Store", store)

    def work(store: Store, job: str, number: int) -> None:
        held = type("Held", (lease,), {"scheduler": scheduler, "job": job})
        for _ in range(10):
            try:
                with held(store) as mine:
                    _save_in_turn(store, mine, job, number, outcome)
                return
            except DirectoryTaken:
                scheduler.sleep(job, RETRY_SECONDS)

    for number, job in enumerate(("first", "second")):
        scheduler.add(job, partial(work, client(job, number), job, number))  # numbers of new nodes are apart
    scheduler.run()
    outcome.operations = scheduler.made
    outcome.look(Bucket(place) if issubclass(kind, Bucket) else Disk(place))
    return outcome


def _save_in_turn(store: Store, lease: SteppedLease, job: str, number: int, outcome: Outcome) -> None:
    """Resume, and save some steps as a run does; stop at the first save that fails."""
    choice = newest_whole(store, RANKS)
    remove_leftovers(store, wait=True)
    done = 0 if choice is None else choice.manifest.step

    def reached(phase: str) -> None:
        if phase == "publish":
            lease.check()

    session = Session(store, RANKS, "run", Retention(last=9), background=False, reached=reached)
    for step in range(done + 1, done + 1 + STEPS):
        lease.scheduler.sleep(job, TRAIN_SECONDS)
        try:
            lease.check()
            session.save(snapshot_of(step, number), step)
            assert session.collect() is not None
        except (PlaceLost, CheckpointError) as error:
            outcome.failed.append(f"{job}: {error}")
            return
        outcome.saved.append((number, step))


def disk_jobs(seed: int, kind: type[Disk] = Disk) -> Outcome:
    """Let two jobs, which no lease keeps apart, save the same steps on one disk."""
    scheduler, tree, outcome = Scheduler(seed), Tree(), Outcome()

    def work(store: Disk, job: str, number: int) -> None:
        store.turn = lambda: scheduler.turn(job)
        session = Session(store, RANKS, "run", Retention(last=9), background=False)
        for step in range(1, 1 + STEPS):
            try:
                session.save(snapshot_of(step, number), step)
                assert session.collect() is not None
            except CheckpointError as error:
                outcome.failed.append(f"{job}: {error}")
            else:
                outcome.saved.append((number, step))

    for number, job in enumerate(("first", "second")):
        scheduler.add(job, partial(work, kind(tree, first=1 + number * 1000), job, number))
    scheduler.run()
    outcome.look(Disk(tree))
    return outcome
