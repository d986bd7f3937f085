"""Every state that a crash can leave of what the shipped code does, and what must hold in each of them.

A scenario runs on a storage in memory that keeps a journal. A cut is a place in the journal and a choice of what was
not durable there; `state_of` makes the storage that a start finds after it, and `Judge` lets the shipped code resume,
clear away and save there.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations, zip_longest
from typing import Any, NamedTuple

import torch

from holdfast.checkpoint.errors import CheckpointError, NoCheckpoint
from holdfast.checkpoint.format.manifest import About
from holdfast.checkpoint.format.shards import shard_file
from holdfast.checkpoint.format.snapshot import Snapshot
from holdfast.checkpoint.keep.choose import ResumeChoice, newest_verified
from holdfast.checkpoint.keep.retention import (
    Retention,
    put_aside,
    read_pins,
    remove_leftovers,
    steps,
    wait_for_deletions,
    write_pins,
)
from holdfast.checkpoint.loading.chunk_reader import check_read_back
from holdfast.checkpoint.place.layout import LATER, fresh, step_name
from holdfast.checkpoint.saving.writer import commit
from holdfast.checkpoint.session import Session
from holdfast.errors import HoldfastError
from holdfast.parallel.collectives import RankGroup
from tests.checkpoint.recording_stores import ROOT, Bucket, Contents, Disk, Effect, Tree

Store = Disk | Bucket
Files = Mapping[str, bytes]
RANKS = RankGroup()
LAST = 2
"""Newest checkpoints that the sessions of scenarios keep."""
BLOCK = 512
"""Bytes of a disk's write that are whole or not there."""
SUBSETS_UP_TO = 10
"""Effects that were not synced, of which all subsets are made."""
REPEATED = 3
"""Requests that were answered and may land a second time after a crash."""


def snapshot_of(step: int, job: int = 0) -> Snapshot:
    """Return a snapshot whose numbers are the step and the job's; its files have less than 2 KiB each."""
    return Snapshot(
        {"model.weight": torch.full((256,), step + job / 2)},
        frozenset({"weight"}),
        {},
        None,
        {"rank": 0},
        {"step": step, "job": job},
        assets={"run.yaml": b"seed: 1\n", "template.jinja": b"{{ x }}", "tokenizer.json": b"{}"},
    )


def newest_read(store: Store) -> ResumeChoice | None:
    """Return the newest whole checkpoint, read as a resume reads it; its tensors are those that were saved."""
    return newest_verified(
        store,
        RANKS,
        use=lambda name, manifest: check_read_back(store, name, manifest, snapshot_of(manifest.step).tensors, RANKS),
    )


def files_of(store: Store, name: str) -> Files:
    """Return the files of a checkpoint by path."""
    if isinstance(store, Bucket):
        return store.files_of(name)
    number = store.tree.folders[ROOT].get(name)
    return store.tree.files(number) if number in store.tree.folders else {}


@dataclass(frozen=True)
class Told:
    """What a job has told its user by some moment, noted in the journal."""

    saved: Mapping[int, Files] = field(default_factory=dict)
    """Checkpoints that were reported as saved and are not aside, by step."""
    aside: Mapping[int, Files] = field(default_factory=dict)
    """Checkpoints that are no good, or were left behind, whose files stay under some name."""
    pinned: frozenset[int] = frozenset()


class Job:
    """A job that saves with the shipped code, and notes what it reports."""

    def __init__(self, store: Store, told: Told | None = None) -> None:
        self.store = store
        self.told = told or Told()
        self._session = Session(store, RANKS, "run", Retention(last=LAST), background=False)
        store.note(self.told)

    def tell(self, **changes: Any) -> None:
        """Note what is told beside, or instead of, what was."""
        self.told = Told(**(vars(self.told) | changes))
        self.store.note(self.told)

    def save(self, step: int) -> None:
        """Save a step, let retention work, and report."""
        self._session.save(snapshot_of(step), step)
        wait_for_deletions(10)
        assert self._session.collect() is not None
        self.report(step, files_of(self.store, step_name(step)))

    def report(self, step: int, files: Files) -> None:
        """Report a step as saved."""
        saved = {old: files for old, files in self.told.saved.items() if files_of(self.store, step_name(old))}
        self.tell(saved=saved | {step: dict(files)})

    def damage(self, step: int) -> None:
        """Flip a bit in the shard of a step, as disks do in time."""
        name = step_name(step)
        path = shard_file(0)
        data = bytearray(self.store.read(f"{name}/{path}"))
        data[len(data) // 2] ^= 1
        if isinstance(self.store, Bucket):
            self.store.replace(f"{name}/{path}", bytes(data))
        else:
            number = self.store._find(f"{name}/{path}")
            self.store.tree.data[number] = bytes(data)
        self._put_aside(step)

    def _put_aside(self, step: int) -> None:
        aside = dict(self.told.aside) | {step: dict(files_of(self.store, step_name(step)))}
        self.tell(saved={old: files for old, files in self.told.saved.items() if old != step}, aside=aside)

    def resume(self) -> None:
        """Choose the newest whole checkpoint, and clear away what is half written."""
        newest_read(self.store)
        remove_leftovers(self.store, wait=True)

    def go_back(self, step: int) -> None:
        """Put later steps aside, the newest first, and note where the run went on from, as a start with `from` does."""
        for later in sorted((old for old in self.told.saved if old > step), reverse=True):
            self._put_aside(later)
            put_aside(self.store, step_name(later), fresh(LATER, step_name(later)))
        self.store.replace("resumed.json", b"{}")

    def pin(self, step: int) -> None:
        """Keep a step for good."""
        write_pins(self.store, [step])
        self.tell(pinned=frozenset({step}))


def saves(*numbers: int) -> Callable[[Job], None]:
    """Return a part of a scenario that saves these steps."""

    def act(job: Job) -> None:
        for number in numbers:
            job.save(number)

    return act


def damaged_newest(job: Job) -> None:
    saves(1, 2, 3)(job)
    job.damage(3)


def put_aside_and_saved_again(job: Job) -> None:
    job.resume()
    job.save(3)


def went_back(job: Job) -> None:
    job.go_back(1)
    job.save(2)


def killed_in_a_save(job: Job) -> None:
    """Save twice, and die in the middle of the third save, in which the shard and a few names were written."""
    saves(1, 2)(job)
    other = copy_of(job.store)
    commit(snapshot_of(3), other, About("run", 3, None, None), RANKS)
    for effect in other.journal[: len(other.journal) // 2]:
        if isinstance(job.store, Bucket):
            job.store.contents.apply(effect)
        elif not effect.kind.startswith("sync"):
            job.store.tree.apply(effect)
    job.store = copy_of(job.store)


def cleared_and_saved(job: Job) -> None:
    job.resume()
    job.save(3)


def pinned_and_saved(job: Job) -> None:
    job.pin(1)
    job.save(3)


class Scenario(NamedTuple):
    """What was done long ago and is durable, and what a crash interrupts."""

    before: Callable[[Job], None]
    act: Callable[[Job], None]


SCENARIOS = {
    "first save": Scenario(saves(), saves(1)),
    "second save": Scenario(saves(1), saves(2)),
    "save with retention": Scenario(saves(1, 2), saves(3)),
    "two saves with retention": Scenario(saves(1, 2), saves(3, 4)),
    "put aside": Scenario(damaged_newest, put_aside_and_saved_again),
    "go back": Scenario(saves(1, 2), went_back),
    "over a killed save": Scenario(killed_in_a_save, cleared_and_saved),
    "pin": Scenario(saves(1, 2), pinned_and_saved),
}


def copy_of(store: Store) -> Any:
    """Return a storage of the same class with the same contents, all of it durable, and an empty journal."""
    if isinstance(store, Bucket):
        return type(store)(store.contents.copy())
    return type(store)(store.tree.copy())


@dataclass
class Recording:
    """A scenario that was run: where it began, and its journal."""

    base: Tree | Contents
    journal: list[Effect]
    known: dict[int, list[Files]]
    """What each step's checkpoint held, as often as it was saved."""
    before: Told
    """What had been told long ago."""

    @cached_property
    def told(self) -> list[Told]:
        """What had been told after so many effects."""
        told = [self.before]
        for effect in self.journal:
            told.append(effect.value if effect.kind == "note" else told[-1])
        return told


def record(scenario: Scenario, kind: type[Store], job_kind: type[Job] = Job) -> Recording:
    """Run a scenario on a class of storages; what went before is honest."""
    earlier = Job(Bucket() if issubclass(kind, Bucket) else Disk())
    scenario.before(earlier)
    base: Any = earlier.store.contents if isinstance(earlier.store, Bucket) else earlier.store.tree
    job = job_kind(kind(base.copy()), earlier.told)
    scenario.act(job)
    return _recording(base, job, {step: [files] for step, files in earlier.told.saved.items()}, earlier.told)


def record_recovery(recording: Recording, cut: Cut) -> Recording:
    """Let the shipped code go on after a crash and save, so that this can crash too."""
    store, told = state_of(recording, cut, dict(_pending(recording))), recording.told[cut.place]
    base = store.contents.copy() if isinstance(store, Bucket) else store.tree.copy()
    job = Job(store, told)
    job.resume()
    job.save(max(steps(store), default=0) + 1)
    return _recording(base, job, {step: list(known) for step, known in recording.known.items()}, told)


def _recording(base: Tree | Contents, job: Job, known: dict[int, list[Files]], before: Told) -> Recording:
    for effect in job.store.journal:
        if effect.kind == "note":
            for step, files in effect.value.saved.items():
                if files not in known.setdefault(step, []):
                    known[step].append(files)
    return Recording(base, list(job.store.journal), known, before)


class Cut(NamedTuple):
    """One crash: after so many effects, with these of what was not durable, and one file torn."""

    place: int
    done: frozenset[int]
    """Places, in the journal, of effects that reached the disk or the bucket though nobody was told."""
    torn: tuple[int, int, bool] | None = None
    """Place of a write of which so many bytes came, and whether the rest is zeros and not missing."""
    in_order: bool = False
    """Whether names changed on the disk in the order of the journal, as file systems with one have it."""
    again: tuple[int, ...] = ()
    """Requests that land, once more, after all others and in this order: clients repeat what they got no answer to."""


def _pending(recording: Recording) -> Iterator[tuple[int, list[int]]]:
    """Yield for each place in a disk's journal the earlier effects that are not durable there and can be seen."""
    durable = recording.base.copy()
    if isinstance(durable, Contents):
        return
    waiting: list[int] = []
    yield 0, []
    for place, effect in enumerate(recording.journal):
        if effect.kind.startswith("sync"):
            done = [index for index in waiting if _is_synced(recording.journal[index], effect)]
            for index in done:
                durable.apply(recording.journal[index])
            waiting = [index for index in waiting if index not in done]
        elif effect.kind != "note":
            durable.hold(effect)
            waiting.append(place)
        seen = _reachable(durable, [recording.journal[index] for index in waiting])
        yield place + 1, [index for index in waiting if recording.journal[index].node in seen]


def _is_synced(effect: Effect, sync: Effect) -> bool:
    return effect.node == sync.node and (effect.kind == "write") == (sync.kind == "sync file")


def _reachable(durable: Tree, waiting: list[Effect]) -> set[int]:
    """Return the nodes that a path can lead to, whichever of the effects that wait come to be."""
    below = {number: set(entries.values()) for number, entries in durable.folders.items()}
    for effect in waiting:
        if effect.kind in {"make", "create", "rename"}:
            below[effect.node].add(effect.value)
    seen, ahead = {ROOT}, [ROOT]
    while ahead:
        new = below.get(ahead.pop(), set()) - seen
        seen |= new
        ahead += new
    return seen


def disk_cuts(recording: Recording, seed: int, most: int) -> Iterator[Cut]:
    """Yield all subsets of what was not durable at each place, drawn ones where it is much, and each file torn.

    Args:
        recording: A scenario.
        seed: Of what is drawn.
        most: Subsets that are drawn at a place.
    """
    rng = random.Random(seed)
    for place, pending in _pending(recording):
        count = len(pending)
        chains = [(1 << size) - 1 for size in range(count + 1)]
        if 1 << count <= max(most, 1 << SUBSETS_UP_TO):
            masks = list(range(1 << count))
        else:
            alone = [1 << bit for bit in range(count)]
            drawn = [rng.getrandbits(count) for _ in range(most)]
            masks = list(dict.fromkeys([*chains, *alone, *(chains[-1] ^ bit for bit in alone), *drawn]))
        for mask in masks:
            done = frozenset(index for bit, index in enumerate(pending) if mask >> bit & 1)
            yield Cut(place, done, in_order=mask in chains)
        for index in pending:
            effect = recording.journal[index]
            if effect.kind != "write":
                continue
            others = [frozenset(pending), frozenset({*rng.sample(pending, count // 2), index})]
            for length in range(0, len(effect.value), BLOCK):
                for zeros in (False, True):
                    yield from (Cut(place, done, (index, length, zeros)) for done in others)


def bucket_cuts(recording: Recording) -> Iterator[Cut]:
    """Yield, at each place, what may have landed of the requests that are in flight there.

    Every subset of them, in every order where it matters; and of these and the last ones before, any two once more.
    """
    journal = recording.journal
    for place in range(len(journal) + 1):
        flight = [index for index in range(place, len(journal)) if _same_flight(journal, place, index)]
        before = [index for index in range(place) if journal[index].kind != "note"][-REPEATED:]
        for mask in range(1 << len(flight)):
            done = [index for bit, index in enumerate(flight) if mask >> bit & 1]
            for count in range(3):
                for again in permutations([*before, *done], count):
                    yield Cut(place, frozenset(done), in_order=not again, again=again)


def _same_flight(journal: list[Effect], first: int, other: int) -> bool:
    one, two = journal[first], journal[other]
    return "note" not in {one.kind, two.kind} and one.node == two.node


def cuts_of(recording: Recording, seed: int, subsets: int, count: int | None = None) -> list[Cut]:
    """Return every crash that is looked at, of either kind of storage; or so many, evenly over the places."""
    cuts = list(
        disk_cuts(recording, seed, subsets if count is None else min(count, subsets))
        if isinstance(recording.base, Tree)
        else bucket_cuts(recording)
    )
    return cuts if count is None else _spread(cuts, count, random.Random(seed))


def state_of(recording: Recording, cut: Cut, durable: Mapping[int, list[int]]) -> Store:
    """Return what a start finds after a crash."""
    base = recording.base.copy()
    if isinstance(base, Contents):
        for index in [*range(cut.place), *sorted(cut.done), *cut.again]:
            if recording.journal[index].kind != "note":
                base.apply(recording.journal[index])
        return Bucket(base)
    for index in range(cut.place):
        base.hold(recording.journal[index])
    missing = set(durable[cut.place]) - cut.done
    for index in range(cut.place):
        effect = recording.journal[index]
        if index in missing or effect.kind.startswith("sync") or effect.kind == "note":
            continue
        if cut.torn is not None and cut.torn[0] == index:
            _, length, zeros = cut.torn
            rest = b"\0" * (len(effect.value) - length) if zeros else b""
            effect = effect._replace(value=effect.value[:length] + rest)
        base.apply(effect)
    return Disk(base)


class Lost(AssertionError):  # noqa: N818 - the name says what happened
    """A promise that does not hold in a state."""


_UNIQUE = re.compile(r"-[0-9a-f]{8}(?=/|$)")


class Judge:
    """Lets the shipped code go on from states that crashes left, and raises `Lost` where it loses anything."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._pending = dict(_pending(recording))
        self._seen: dict[Any, str | None] = {}
        self._saved_on: dict[Any, None] = {}

    def fault(self, cut: Cut) -> str | None:
        """Return which promise does not hold after a crash; None if all do."""
        told = self._recording.told[cut.place]
        store = state_of(self._recording, cut, self._pending)
        key = id(told), cut.in_order, self._key(store)
        if key not in self._seen:
            try:
                self._go_on(store, told, in_order=cut.in_order)
            except Lost as lost:
                self._seen[key] = str(lost)
            else:
                self._seen[key] = None
        return self._seen[key]

    def distinct(self) -> int:
        """Return how many states differed."""
        return len(self._seen)

    @staticmethod
    def _key(store: Store) -> Any:
        if isinstance(store, Bucket):
            return frozenset(store.contents.objects.items())
        return frozenset(store.tree.files().items()), frozenset(store.tree.folders[ROOT])

    def _is_whole(self, store: Store, step: int) -> bool:
        files = files_of(store, step_name(step))
        return any(files == known for known in self._recording.known.get(step, ()))

    def _check_kept(self, store: Store, told: Told, when: str) -> None:
        whole = [step for step in self._recording.known if self._is_whole(store, step)]
        for step in told.saved:
            newer = [other for other in whole if other > step]
            if step not in whole and (step in told.pinned or len(newer) < LAST):
                raise Lost(f"{when}: step {step} was reported and is gone; whole are {whole}")
        for step, files in told.aside.items():
            names = [name for name in store.names() if step_name(step) in name]
            stored = [files_of(store, name) for name in names]
            if not all(any(one.get(path) == data for one in stored) for path, data in files.items()):
                raise Lost(f"{when}: step {step} was put aside and some of it is gone; there are {names}")

    @staticmethod
    def _check_pins(store: Store, told: Told) -> None:
        try:
            pinned = read_pins(store)
        except CheckpointError as error:
            raise Lost(f"pins cannot be read: {error}") from error
        if not pinned >= told.pinned:
            raise Lost(f"steps {sorted(told.pinned)} were pinned, and {sorted(pinned)} are")

    def _go_on(self, store: Store, told: Told, *, in_order: bool) -> None:
        self._check_kept(store, told, "after the crash")
        self._check_pins(store, told)
        listed = [step for step in steps(store) if step not in told.aside]
        half = [step for step in listed if not self._is_whole(store, step)]
        if in_order and half:
            raise Lost(f"steps {half} are listed and are not whole")
        chosen = self._chosen(store, told)
        self._check_kept(store, told, "after the choice")
        try:
            remove_leftovers(store, wait=True)
        except Exception as error:
            raise Lost(f"leftovers cannot be removed: {error!r}") from error
        self._check_kept(store, told, "after the leftovers were removed")
        tree = sorted((_UNIQUE.sub("", path), data) for path, data in self._key_files(store))
        key = chosen, tuple(tree)
        if key not in self._saved_on:
            self._save_on(store, chosen + 1)
            self._saved_on[key] = None
            self._check_kept(store, told, "after a further save")

    @staticmethod
    def _key_files(store: Store) -> Any:
        return (store.contents.objects if isinstance(store, Bucket) else store.tree.files()).items()

    def _chosen(self, store: Store, told: Told) -> int:
        newest = max(told.saved, default=0)
        before = {step: files_of(store, name) for step, name in steps(store).items()}
        try:
            choice = newest_read(store)
        except NoCheckpoint as error:
            if told.saved or told.aside:
                raise Lost(f"refused, though steps {sorted(told.saved)} were reported: {error}") from error
            return 0
        except Exception as error:
            raise Lost(f"the choice raised {error!r}") from error
        if choice is None:
            if told.saved:
                raise Lost(f"nothing was found, though steps {sorted(told.saved)} were reported")
            return 0
        step = choice.manifest.step
        if step < newest:
            raise Lost(f"step {step} was chosen, and {newest} was reported")
        if before[step] not in self._recording.known.get(step, ()):
            raise Lost(f"step {step} was chosen, and is not what was saved")
        return step

    @staticmethod
    def _save_on(store: Store, step: int) -> None:
        try:
            manifest = commit(snapshot_of(step), store, About("run", step, None, None), RANKS)
            choice = newest_read(store)
        except (HoldfastError, CheckpointError, OSError) as error:
            raise Lost(f"a further save of step {step} failed: {error!r}") from error
        if choice is None or choice.manifest.hash != manifest.hash:
            raise Lost(f"a further save of step {step} was not found")


def _spread(cuts: list[Cut], count: int, rng: random.Random) -> list[Cut]:
    """Return so many crashes, as evenly over the places in the journal as there are different ones."""
    rng.shuffle(cuts)
    by_place: dict[int, list[Cut]] = {}
    for cut in cuts:
        by_place.setdefault(cut.place, []).append(cut)
    rounds = zip_longest(*by_place.values())
    return [cut for one in rounds for cut in one if cut is not None][:count]


def faults_of(
    recording: Recording, count: int | None, seed: int = 0, *, subsets: int = 1000
) -> tuple[list[tuple[Cut, str]], int, int]:
    """Return the crashes in which something is lost; how many were looked at, and how many states differed.

    Args:
        recording: A scenario.
        count: Crashes to look at; None for all.
        seed: Of what is drawn.
        subsets: Subsets that are drawn at a place where more than ten effects are not durable.
    """
    cuts = cuts_of(recording, seed, subsets, count)
    judge = Judge(recording)
    faults = [(cut, fault) for cut in cuts if (fault := judge.fault(cut)) is not None]
    return faults, len(cuts), judge.distinct()
