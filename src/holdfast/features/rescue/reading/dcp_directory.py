"""Reads a torch distributed checkpoint (DCP) directory of another system: tensors in chunks, and pickles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from holdfast.checkpoint.errors import CheckpointCorrupt
from holdfast.features.rescue.reading.parts import opened_file
from holdfast.features.rescue.reading.pickles import is_plain
from holdfast.features.rescue.reading.record import DamagedFile, ForeignCheckpoint, StoredTensor, TensorPiece
from holdfast.files import REGULAR, file_kind, read_bytes

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

METADATA = ".metadata"
"""The list of contents; torch gives it this name."""
_MOST_METADATA = 2**30


class DcpDirectory:
    """The contents of one DCP directory. Missing and truncated files are recorded in its `ForeignCheckpoint`."""

    def __init__(self, folder: Path, checkpoint: ForeignCheckpoint) -> None:
        """Read the list of contents, and compare it with the files.

        Raises:
            DamagedFile: There is no list, or it is damaged.
        """
        from holdfast.features.rescue.reading.dcp_metadata import (
            read_dcp_metadata,
        )  # imports what other formats do without

        self.folder, self._checkpoint = folder, checkpoint
        path = folder / METADATA
        try:
            kind = file_kind(path, checkpoint.path)
            if kind != REGULAR:
                raise DamagedFile(f"{METADATA} is {kind}")
            data = read_bytes(path, _MOST_METADATA)
            if not data:
                raise DamagedFile(f"{METADATA} is empty")
            self._metadata: Metadata = read_dcp_metadata(data, str(path))
        except FileNotFoundError:
            raise DamagedFile(
                f"lacks {METADATA}, which the first rank writes when all others have written: the save never ended"
            ) from None
        except (CheckpointCorrupt, OSError) as error:
            raise DamagedFile(str(error)) from None
        self._chunks: dict[str, dict[tuple[int, ...] | None, Any]] = {}
        for index, info in (self._metadata.storage_data or {}).items():
            offset = None if index.offset is None else tuple(index.offset)
            self._chunks.setdefault(index.fqn, {})[offset] = info
        self._sizes = self._measured()
        self.keys_of: dict[str, tuple[Any, ...]] = self._paths()
        """Flat name -> the keys it was made of; only names that DCP made flat are listed by their keys."""

    def _measured(self) -> dict[str, int]:
        """Return the sizes of the files that are there, and note what is missing, cut short or not listed."""
        ends: dict[str, int] = {}
        for chunks in self._chunks.values():
            for info in chunks.values():
                ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        self._compare_list_with_itself()
        sizes = {}
        prefix = "" if self.folder == self._checkpoint.path else f"{self.folder.name}/"
        for name, end in sorted(ends.items()):
            path = self.folder / name
            try:
                kind = file_kind(path, self._checkpoint.path)
            except OSError:
                self._checkpoint.add("damage", f"{prefix}{name} is missing")
                continue
            if kind != REGULAR:
                self._checkpoint.add("damage", f"{prefix}{name} is {kind}")
                continue
            sizes[name] = path.stat().st_size
            if sizes[name] < end:
                self._checkpoint.add("damage", f"{prefix}{name} has {sizes[name]:,} bytes, {end:,} were written")
        extra = [file.name for file in self.folder.glob("*.distcp") if file.name not in ends]
        if extra:
            self._checkpoint.add("damage", f"{prefix}{sorted(extra)[0]} is not in {METADATA}: it is of another save")
        return sizes

    def _compare_list_with_itself(self) -> None:
        """Note what the list, which has no checksum, says in one way here and in another there."""
        strange = sorted(self._chunks.keys() - self._metadata.state_dict_metadata.keys())
        if strange:
            self._checkpoint.add("damage", f"{METADATA} says where {strange[0]} lies, and lists no such name")
        ranges: dict[str, list[tuple[int, int, str]]] = {}
        for name, chunks in self._chunks.items():
            for info in chunks.values():
                ranges.setdefault(info.relative_path, []).append((info.offset, info.offset + info.length, name))
        for file, taken in ranges.items():
            taken.sort()
            for (_, end, first_name), (start, _, second_name) in pairwise(taken):
                if start < end:
                    message = f"{METADATA} puts {first_name} and {second_name} at the same bytes of {file}"
                    self._checkpoint.add("damage", message)
                    break

    def _paths(self) -> dict[str, tuple[Any, ...]]:
        planner_data = self._metadata.planner_data
        names = list(self._metadata.state_dict_metadata)
        if not isinstance(planner_data, dict) or not planner_data:
            return {name: (name,) for name in names}
        for name in names:
            if not isinstance(planner_data.get(name), tuple) or ".".join(map(str, planner_data[name])) != name:
                raise DamagedFile(
                    f"{METADATA} contradicts itself: the keys of {name} are {planner_data.get(name)!r:.200}"
                )
        return {name: planner_data[name] for name in names}

    def __iter__(self) -> Iterator[str]:
        """Yield all names."""
        return iter(self._metadata.state_dict_metadata)

    def is_tensor(self, name: str) -> bool:
        """Return whether a name is a tensor's; others are pickles."""
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        return isinstance(self._metadata.state_dict_metadata[name], TensorStorageMetadata)

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor, read when it is asked for.

        Raises:
            DamagedFile: A chunk of it is nowhere, or the name is a pickle's.
        """
        if not self.is_tensor(name):
            raise DamagedFile(f"lists {name}, which is no tensor")
        entry: Any = self._metadata.state_dict_metadata[name]
        pieces = []
        for chunk in entry.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            info = self._chunks.get(name, {}).get(offsets)
            if info is None and not sizes:
                info = self._chunks.get(name, {}).get(None)
            if info is None:
                if 0 in sizes:
                    continue
                raise DamagedFile("has a part that no file holds")
            if getattr(info, "transform_descriptors", None):
                raise DamagedFile("is stored compressed, which is not read")
            pieces.append(self._piece(offsets, sizes, entry.properties.dtype, info))
        return StoredTensor(tuple(entry.size), entry.properties.dtype, tuple(pieces))

    def _piece(self, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: Any, info: Any) -> TensorPiece:
        path = self.folder / info.relative_path

        def fill(target: Tensor) -> None:
            file = opened_file(self._checkpoint, path, info.offset, info.length)
            view = file.value()
            if not is_plain(view) or view.shape != sizes or view.dtype != dtype:
                raise DamagedFile(f"{path.name} holds another tensor at byte {info.offset:,} than {METADATA} says")
            file.fill(view, target)

        return TensorPiece(offsets, sizes, dtype, fill, info.relative_path)

    def value(self, name: str) -> Any:
        """Return what a pickle holds.

        Raises:
            DamagedFile: It is nowhere, damaged, or asks for a class.
        """
        info = next(iter(self._chunks.get(name, {}).values()), None)
        if info is None:
            raise DamagedFile("is in no file")
        if info.length > _MOST_METADATA or self._sizes.get(info.relative_path, 0) < info.offset + info.length:
            raise DamagedFile("is cut short")
        path = self.folder / info.relative_path
        return opened_file(self._checkpoint, path, info.offset, info.length).value()


def is_dcp(folder: Path) -> bool:
    """Return whether a directory is one that DCP wrote, or began to write."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names are enough
    except OSError:
        return False
    return METADATA in names or any(name.endswith(".distcp") for name in names)
