"""The storages in memory do what the shipped ones do: the same script leaves the same trees, errors and fsyncs."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

from holdfast.checkpoint.place.storage import LocalStorage, Storage
from holdfast.features.object_store import bucket
from holdfast.features.object_store.bucket import FsspecBucket
from tests.checkpoint.recording_stores import ROOT, Bucket, Contents, Disk, Requests

Act = Callable[[Any], object]


def write(storage: Storage, path: str, data: bytes, error: Exception | None = None) -> tuple[int, str]:
    with storage.create(path) as file:
        file.write(data)
        if error is not None:
            raise error
    return file.bytes_written, file.hexdigest()


def opened(storage: Storage, path: str) -> bytes:
    with storage.open(path) as file:
        return file.read()


ON_A_DISK: list[Act] = [
    lambda store: store.make("s"),
    lambda store: store.make("s"),
    lambda store: store.make("s/files"),
    lambda store: store.make("deep/deeper"),
    lambda store: store.names(),
    lambda store: write(store, "s/files/one", b"1" * 600),
    lambda store: write(store, "s/files/two.tmp", b"two"),
    lambda store: store.rename("s/files/two.tmp", "s/files/two"),
    lambda store: write(store, "s/trainer.json", b"{}"),
    lambda store: write(store, "s/trainer.json", b"other"),
    lambda store: store.put_new("s/manifest.json", b"m"),
    lambda store: store.put_new("s/manifest.json", b"n"),
    lambda store: (store.names(), store.names("s"), store.names("nothing"), store.names("s/files")),
    lambda store: (store.files("s"), store.files("s/files"), store.files("nothing")),
    lambda store: [store.exists(path) for path in ("s", "s/files/one", "s/files/on", "s/trainer.json/x", "x/y")],
    lambda store: [store.is_file(path) for path in ("s", "s/files/one", "nothing")],
    lambda store: (
        store.read("s/files/one"),
        store.size("s/files/one"),
        store.hash("s/files/one", from_disk=True),
    ),
    lambda store: store.read("s"),
    lambda store: store.read("s/trainer.json/x"),
    lambda store: write(store, "absent/x", b""),
    lambda store: write(store, "s/half", b"half of it", ValueError("stop")),
    lambda store: [store.sync(path) for path in ("s/files", "s", "")],
    lambda store: store.sync("nothing"),
    lambda store: store.publish("s", "step-1"),
    lambda store: store.make("s"),
    lambda store: store.publish("s", "step-1"),
    lambda store: store.rename("s", "step-1"),
    lambda store: store.rename("nothing", "new"),
    lambda store: store.remove("s"),
    lambda store: store.rename("step-1", "s"),
    lambda store: store.read("s/nothing"),
    lambda store: store.size("nothing"),
    lambda store: store.replace("pins.json", b"[1]"),
    lambda store: store.replace("pins.json", b"[1, 2]"),
    lambda store: store.overwrite("pins.json", b"[3, 4]"),
    lambda store: store.overwrite("nothing", b"[3, 4]"),
    lambda store: (opened(store, "pins.json"), store.age("pins.json") >= 0),
    lambda store: store.rename("s", "t"),
    lambda store: store.remove("t/files/one"),
    lambda store: store.remove("t/files/one"),
    lambda store: store.remove("nothing"),
    lambda store: store.remove("t"),
]
REQUESTS: list[Act] = [
    lambda bucket: (bucket.entries(""), bucket.below("")),
    lambda bucket: uploaded(bucket, "s/files/one", b"1" * 600),
    lambda bucket: bucket.put("s/trainer.json", b"{}"),
    lambda bucket: bucket.put("s/trainer.json", b"other"),
    lambda bucket: bucket.put_new("s.ref", b"m"),
    lambda bucket: bucket.put_new("s.ref", b"m"),
    lambda bucket: bucket.put_new("s.ref", b"n"),
    lambda bucket: (bucket.get("s.ref"), bucket.download("s/files/one").read()),
    lambda bucket: bucket.get("nothing"),
    lambda bucket: [bucket.has(name) for name in ("s", "s.ref", "s/files", "s/files/one", "nothing")],
    lambda bucket: [bucket.entries(prefix) for prefix in ("", "s", "s/files", "nothing")],
    lambda bucket: [bucket.below(prefix) for prefix in ("", "s", "s/files", "nothing")],
    lambda bucket: bucket.age("s.ref") >= 0,
    lambda bucket: bucket.age("nothing"),
    lambda bucket: bucket.delete(["s.ref", "s/files/one", "nothing"]),
    lambda bucket: bucket.delete([]),
    lambda bucket: bucket.below(""),
]


def uploaded(bucket: bucket.Bucket, name: str, data: bytes) -> None:
    with bucket.upload(name) as file:
        file.write(data)


def answer(act: Act, store: Any) -> Any:
    try:
        return act(store)
    except (OSError, ValueError) as error:
        return type(error).__name__


@contextmanager
def watching_fsync() -> Iterator[list[str]]:
    """Collect the paths that this process syncs, as the interpreter sees the calls."""
    seen: list[str] = []

    def watch(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called is os.fsync:
            values = frame.f_locals
            descriptor = values["descriptor"] if "descriptor" in values else values["self"].fileno()
            seen.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield seen
    finally:
        sys.setprofile(before)


def synced(disk: Disk, since: int) -> list[str]:
    """Return the paths of what was synced, by the names that it had then."""
    paths = []
    replayed = Disk()
    for place, effect in enumerate(disk.journal):
        if effect.kind.startswith("sync") and place >= since:
            paths.append(path_of(replayed, effect.node))
        elif not effect.kind.startswith("sync"):
            replayed.tree.apply(effect)
    return paths


def path_of(disk: Disk, number: int) -> str:
    if number == ROOT:
        return ""
    for folder, entries in disk.tree.folders.items():
        for name, entry in entries.items():
            if entry == number:
                return f"{path_of(disk, folder)}/{name}"
    raise AssertionError(number)


def below(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_the_disk_in_memory_does_and_syncs_what_a_directory_does(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    local, disk = LocalStorage(root), Disk()
    answers, trees = [], []
    for act in ON_A_DISK:
        since = len(disk.journal)
        with watching_fsync() as fsyncs:
            expected = answer(act, local)

        found = answer(act, disk)

        answers.append((found, synced(disk, since)))
        assert answers[-1] == (expected, [path.removeprefix(str(root)) for path in fsyncs]), len(answers)
        folders = {path_of(disk, number)[1:]: None for number in reachable(disk) if number != ROOT}
        trees.append(disk.tree.files() | folders)
        assert trees[-1] == below(root), len(trees)
    assert sum(len(paths) for _, paths in answers) == 12


def reachable(disk: Disk) -> list[int]:
    numbers = [ROOT]
    for number in numbers:
        numbers += [entry for entry in disk.tree.folders[number].values() if entry in disk.tree.folders]
    return numbers


def requests_in_memory() -> Requests:
    return cast("Requests", Bucket(Contents())._bucket)


def test_requests_in_memory_do_what_a_store_s_do() -> None:
    store, memory = FsspecBucket(f"memory://{uuid.uuid4().hex}"), requests_in_memory()

    for place, act in enumerate(REQUESTS):
        assert answer(act, memory) == answer(act, store), place
        assert memory.contents.objects == {name: store.get(name) for name in store.below("")}, place


def test_a_recorded_journal_leads_to_what_is_there() -> None:
    disk, memory = Disk(), requests_in_memory()
    for act in ON_A_DISK[:-1]:
        answer(act, disk)
    for act in REQUESTS:
        answer(act, memory)
    memory.put("last", b"1")

    replayed_disk, contents = Disk(), Contents()
    for effect in disk.journal:
        if not effect.kind.startswith("sync"):
            replayed_disk.tree.apply(effect)
    for effect in memory.recording.journal:
        contents.apply(effect)

    assert replayed_disk.tree.files() == disk.tree.files() != {}
    assert contents.objects == memory.contents.objects != {}
