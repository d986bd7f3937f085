"""Defects of saves, of retention and of stores, each a few lines that differ from what is shipped."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.checkpoint.format.manifest import NAME, About
from holdfast.checkpoint.format.shards import shard_file
from holdfast.checkpoint.keep.retention import Retention, apply_retention
from holdfast.checkpoint.place.hashing import HashingWriter
from holdfast.checkpoint.place.layout import QUARANTINE, STAGING, TRASH, step_name, step_of
from holdfast.checkpoint.saving.writer import commit
from tests.checkpoint.crash_states import LAST, RANKS, Job, files_of, snapshot_of
from tests.checkpoint.recording_stores import Bucket, Contents, Disk, Requests


class NoFileIsSynced(Disk):
    def sync_file(self, number: int) -> None:
        pass


class NewNameIsNotSynced(Disk):
    def publish(self, staging: str, final: str) -> None:
        self.rename(staging, final)


class NoFolderOfASaveIsSynced(Disk):
    def sync(self, path: str) -> None:
        if not path:
            super().sync(path)


class PublishedBeforeItsFilesAreSynced(Disk):
    def __init__(self, *tree: object) -> None:
        super().__init__(*tree)  # type: ignore[arg-type]
        self.later: list[int] = []

    def sync_file(self, number: int) -> None:
        self.later.append(number)

    def publish(self, staging: str, final: str) -> None:
        super().publish(staging, final)
        for number in self.later:
            super().sync_file(number)


class DeletedUnderItsOwnName(Disk):
    def rename(self, old: str, new: str) -> None:
        if new.startswith(TRASH):
            self.remove(old)
        else:
            super().rename(old, new)


class PutAsideDeletes(Disk):
    def rename(self, old: str, new: str) -> None:
        if new.startswith(QUARANTINE):
            self.remove(old)
        else:
            super().rename(old, new)


class PutAsideIsNotSynced(Disk):
    def sync(self, path: str) -> None:
        if self.journal[-1].kind != "rename" or not self.journal[-1].other.startswith(QUARANTINE):
            super().sync(path)


class ReplacedInPlace(Disk):
    """Small files are written over what they held."""

    def replace(self, path: str, data: bytes) -> None:
        self.remove(path)
        self.put_new(path, data)


class ReferenceIsPutFirst(Bucket):
    """Shards are uploaded in the background, and nobody waits for them before the commit."""

    def __init__(self, contents: Contents | None = None) -> None:
        super().__init__(contents)
        self.later: dict[str, bytes] = {}

    @contextmanager
    def create(self, path: str) -> Iterator[HashingWriter]:
        if not path.endswith(shard_file(0)):
            with super().create(path) as file:
                yield file
            return
        buffer = io.BytesIO()
        yield HashingWriter(buffer)
        self.later[path] = buffer.getvalue()

    def size(self, path: str) -> int:
        return len(self.later[path]) if path in self.later else super().size(path)

    def publish(self, staging: str, final: str) -> None:
        super().publish(staging, final)
        for shard in sorted(self.later):
            super().replace(shard, self.later.pop(shard))


class DeletedBeforeItsReference(Bucket):
    """A deletion begins with the files, under the checkpoint's own name."""

    def rename(self, old: str, new: str) -> None:
        if not new.startswith(TRASH):
            super().rename(old, new)
            return
        for file in self.files(old):
            super().remove(f"{old}/{file}")
        super().remove(old)


class MovedFileByFile(Bucket):
    """What is put aside is moved one file after the other, the manifest first."""

    def rename(self, old: str, new: str) -> None:
        if old.startswith(STAGING):
            super().rename(old, new)
            return
        for name in sorted(self.files(old), key=lambda name: (name != NAME, name)):
            data = self.read(f"{old}/{name}")
            self.remove(f"{old}/{name}")
            self.replace(f"{new}/{name}", data)
        self.remove(old)


class PublishReplaces(Disk):
    def publish(self, staging: str, final: str) -> None:
        self.remove(final)
        super().publish(staging, final)


class PutsRequests(Requests):
    def put_new(self, name: str, data: bytes) -> None:
        self.put(name, data)


class PutWhateverIsThere(Bucket):
    """No put asks whether the object is there."""

    requests = PutsRequests


class RetentionBeforeTheSave(Job):
    """Makes room before the new checkpoint is there."""

    def save(self, step: int) -> None:
        apply_retention(self.store, Retention(last=LAST - 1), wait=True)
        super().save(step)


class RetentionOfWhatIsWritten(Job):
    """Decides what stays before the save, and so deletes what was saved."""

    def save(self, step: int) -> None:
        commit(snapshot_of(step), self.store, About("run", step, None, None), RANKS)
        files = dict(files_of(self.store, step_name(step)))
        for name in self.store.names():
            if name.startswith("step-") and step_of(name) not in self.told.saved:
                self.store.rename(name, TRASH + name)
                self.store.remove(TRASH + name)
        self.report(step, files)
