"""Writer and reader of torch's distributed checkpoint (DCP) on our storage: hashed while written, fsynced, verified.

The result is a plain DCP directory, which `torch.distributed.checkpoint.load` can read. Only the file system below the
writer and the source of the reader's chunks are replaced. The file `.metadata` is a pickle, which could execute code
and allocate any amount of memory; it is therefore read with an unpickler that knows only DCP's own classes.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future
from torch.serialization import _get_layout, get_crc32_options, set_crc32_options

from holdfast.checkpoint.errors import CheckpointCorrupt
from holdfast.checkpoint.format.manifest import FileEntry, TensorEntry
from holdfast.checkpoint.format.modest_pickles import is_modest
from holdfast.checkpoint.place.memory import no_memory_for
from holdfast.checkpoint.place.storage import Storage
from holdfast.parallel.failure.classify import is_out_of_memory


def one_process_is_meant() -> None:
    """Silence torch's warning that a save or load runs in one process: it does because there is one."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


@contextmanager
def without_crc32() -> Iterator[None]:
    """Let torch.save leave out its 32-bit checksums: the files are hashed in 128 bits.

    torch.load and DCP read such files as they read any; only tools for zip archives miss the checksum.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


class _Files(FileSystemBase):
    """DCP's file system interface on top of our storage; records size and hash of each file written."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._temporary: dict[str, bytes] = {}
        self.written: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file for reading, or a new one for writing."""
        if "w" not in mode:
            with self._storage.open(str(path)) as file:
                yield file
            return
        if str(path).endswith(".tmp") and not self._storage.renames:
            # Put under this name by a job that was suspended for long, it would be in a checkpoint of another job.
            buffer = io.BytesIO()
            yield buffer
            self._temporary[str(path)] = buffer.getvalue()
            return
        with self._storage.create(str(path)) as writer:
            yield writer
        self.written[str(path)] = FileEntry(writer.bytes_written, writer.hexdigest())

    def concat_path(self, path: Any, suffix: str) -> str:
        """Join."""
        return f"{path}/{suffix}"

    def rename(self, path: Any, new_path: Any) -> None:
        """Rename, and remember under the new name."""
        if self._storage.renames:
            self._storage.rename(str(path), str(new_path))
            self.written[str(new_path)] = self.written.pop(str(path))
            return
        with self._storage.create(str(new_path)) as file:  # an object is put only where none is
            file.write(self._temporary.pop(str(path)))
        self.written[str(new_path)] = FileEntry(file.bytes_written, file.hexdigest())

    def init_path(self, path: Any) -> str:
        """Return the path as text."""
        return str(path)

    def mkdir(self, path: Any) -> None:
        """Do nothing: directories are made before DCP is called."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Accept any path; ours are checked before."""
        return bool(checkpoint_id)

    def exists(self, path: Any) -> bool:
        """Return whether it is there."""
        return self._storage.exists(str(path))

    def rm_file(self, path: Any) -> None:
        """Remove; in an object store nothing of this name can be our own, and putting it will fail."""
        if self._storage.renames:
            self._storage.remove(str(path))


class Writer(FileSystemWriter):
    """DCP's writer on our storage, with one thread and one file per rank; existing files are never overwritten."""

    def __init__(self, storage: Storage, path: str) -> None:
        # More threads swallow errors of all but one of them (pytorch#191391); durability is the storage's part.
        super().__init__(path, single_file_per_rank=True, sync_files=False, thread_count=1, overwrite=False)
        self.files = _Files(storage)
        self.fs = self.files  # type: ignore[assignment]  # torch annotates its own subclass
        self.path = path

    def written(self, below: str) -> dict[str, FileEntry]:
        """Return this rank's files, relative to a directory."""
        return {name.removeprefix(f"{below}/"): entry for name, entry in self.files.written.items()}


class Reader(FileSystemReader):
    """DCP's reader with metadata that was read before, and a function that reads and verifies chunks."""

    def __init__(self, path: str, metadata: Metadata, chunk: Callable[[Any, Any], Tensor]) -> None:
        """Set up a reader.

        Args:
            path: DCP's directory, for messages. metadata: Its metadata. chunk: Returns a complete stored chunk; its
            arguments are the chunk's index and storage info in the metadata.
        """
        super().__init__(path)
        self._metadata, self._chunk = metadata, chunk

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the metadata."""
        if self._metadata.storage_meta is not None:
            self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the wanted part of each chunk, in the order in which chunks lie in their files."""
        stored = {item.storage_index: self.storage_data[item.storage_index] for item in plan.items}
        positions = {index: (info.relative_path, info.offset) for index, info in stored.items()}
        for item in sorted(plan.items, key=lambda item: positions[item.storage_index]):
            chunk = self._chunk(item.storage_index, stored[item.storage_index])
            target = planner.resolve_tensor(item).detach()
            ranges = zip(item.storage_offsets, item.lengths, strict=True)
            target.copy_(chunk[tuple(slice(start, start + size) for start, size in ranges)])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


_NOTHING = object()
_CLASSES = {
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.planner", "SavePlan"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
}


def _functions() -> dict[tuple[str, str], Callable[..., Any]]:
    """Return what stands for the functions that metadata calls; new ones each time, since a pickle can change them."""

    def member(kind: Any, name: Any) -> Any:
        # `getattr` itself would open everything that hangs on a class.
        if kind is not _MEM_FORMAT_ENCODING or type(name) is not str or name not in kind.__members__:
            raise pickle.UnpicklingError("it asks for an attribute that is no memory format, which no checkpoint needs")
        return kind[name]

    def layout(name: Any) -> Any:
        return _get_layout(name)  # type: ignore[no-untyped-call]

    return {
        # Python 3.11.0 to 3.11.3 write a member of an enumeration as getattr(class, "name"), others as class(value).
        ("builtins", "getattr"): member,
        ("__builtin__", "getattr"): member,
        ("torch.serialization", "_get_layout"): layout,
    }


class _Unpickler(pickle.Unpickler):
    """An unpickler that accepts only the classes of DCP's metadata, and restores them if the pickle changed them."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._functions = _functions()
        self._before: dict[type, tuple[Any, dict[str, Any]]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a listed class or a dtype; refuse the rest."""
        if (module, name) in self._functions:
            return self._functions[module, name]
        if module == "pathlib._local":  # Python 3.13 alone has this module
            module = "pathlib"
        if (module, name) in _CLASSES:
            kind = super().find_class(module, name)
            self._before.setdefault(kind, (kind.__bases__, dict(vars(kind))))
            return kind
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")

    def load(self) -> Any:
        """Return what the pickle holds.

        Raises:
            UnpicklingError: It asks for a name that is not listed, or sets attributes of a class: they are put back.
        """
        try:
            return super().load()
        finally:
            changed = [kind.__name__ for kind, before in self._before.items() if _put_back(kind, *before)]
            if changed:
                raise pickle.UnpicklingError(f"it sets attributes of the class {changed[0]}, which no checkpoint needs")


def _put_back(kind: Any, bases: tuple[type, ...], attributes: Mapping[str, Any]) -> bool:
    """Give a class what it had before; return whether it had anything else."""
    current = dict(vars(kind))
    changed = [
        name for name in {*current, *attributes} if current.get(name, _NOTHING) is not attributes.get(name, _NOTHING)
    ]
    for name in changed:  # by the method of `type`, since an enumeration has one of its own that refuses
        if name in attributes:
            type.__setattr__(kind, name, attributes[name])
        else:
            type.__delattr__(kind, name)
    if kind.__bases__ == bases:
        return bool(changed)
    kind.__bases__ = bases
    return True


def read_dcp_metadata(data: bytes, path: str, *, foreign: bool = False) -> Metadata:
    """Read DCP's metadata without running anything it brings.

    Args:
        data: The file.
        path: Its path.
        foreign: Whether it may list things that are no tensors, each of them a pickle; ours never does.

    Raises:
        CheckpointCorrupt: The metadata is damaged, hostile, or lists something that is not a tensor.
        CheckpointUnreadable: This machine is short of memory.
    """
    try:
        metadata = _Unpickler(data).load()
        _check_form(metadata, foreign=foreign)
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises whatever it likes
        if is_out_of_memory(error) and is_modest(data):  # a damaged pickle may ask for a table of gigabytes
            raise no_memory_for(path, len(data)) from error
        raise CheckpointCorrupt(f"{path} cannot be read: {str(error) or type(error).__name__}.") from None
    assert isinstance(metadata, Metadata)
    return metadata


def _check_form(metadata: Any, *, foreign: bool) -> None:
    """Check all attributes of the metadata that are used later; a damaged pickle may have any others, or none."""
    if not isinstance(metadata, Metadata):
        raise TypeError(f"it holds a {type(metadata).__name__}, not DCP metadata")
    for name, entry in metadata.state_dict_metadata.items():
        if foreign and isinstance(entry, BytesStorageMetadata):
            continue
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"it lists {name}, which is no tensor: reading it would unpickle it")
        numbers = [*entry.size, *(number for chunk in entry.chunks for number in (*chunk.offsets, *chunk.sizes))]
        if set(map(type, numbers)) - {int}:
            raise TypeError(f"the shape of {name} is damaged")
        if any(not len(entry.size) == len(chunk.offsets) == len(chunk.sizes) for chunk in entry.chunks):
            raise ValueError(f"a chunk of {name} has another number of dimensions")
    _check_places(metadata)


def _check_places(metadata: Metadata) -> None:
    for index, info in (metadata.storage_data or {}).items():
        if (type(index.fqn), type(info.offset), type(info.length)) != (str, int, int):
            raise TypeError(f"the place of {index.fqn} is damaged")
        if "/" in info.relative_path:
            raise ValueError(f"it leads out of the checkpoint, to {info.relative_path}")


def without_chunks(metadata: Metadata, tensors: Mapping[str, TensorEntry]) -> list[str]:
    """Return the tensors of which DCP does not list, or did not store, exactly the chunks of the manifest.

    DCP checks neither when it loads: memory that no chunk covers keeps what was in it.
    """
    stored = {(index.fqn, tuple(index.offset or ())) for index in metadata.storage_data or {}}
    incomplete = []
    for name, entry in tensors.items():
        listed: Any = metadata.state_dict_metadata.get(name)
        listed_chunks = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in listed.chunks} if listed else set()
        expected = {(chunk.offsets, chunk.sizes) for chunk in entry.chunks if 0 not in chunk.sizes}
        # A rank without rows may write no chunk.
        listed_chunks = {(offsets, sizes) for offsets, sizes in listed_chunks if 0 not in sizes}
        if listed_chunks != expected or any((name, offsets) not in stored for offsets, _ in expected):
            incomplete.append(name)
    return incomplete
