"""Read and write safetensors files tensor by tensor.

The format (https://github.com/huggingface/safetensors): eight bytes of little-endian header length, a JSON header with
dtype, shape and byte range of every tensor, then the bytes. The library's writer needs all tensors of a file in memory
at once; `write_file` writes each piece of a tensor as it arrives, while the next one is being gathered.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import RawIOBase
from pathlib import Path, PurePath
from typing import IO, Any, NamedTuple, Self

import torch
from torch import Tensor

from holdfast.errors import ModelError
from holdfast.files import open_regular, parse_json, read_json
from holdfast.models.files.conversion import Header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_LONGEST_HEADER = 100_000_000
"""Largest header that the format allows, in bytes."""
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def read_header(path: Path) -> dict[str, Header]:
    """Return what a file holds, and check that its bytes are all there.

    Raises:
        ModelError: The file is cut short or no safetensors file.
    """
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ModelError(f"{path} is no safetensors file, or it is cut short ({size} bytes). Copy it again.")
        if length > _LONGEST_HEADER:
            raise ModelError(f"{path} announces a header of {length:,} bytes; none has more than {_LONGEST_HEADER:,}.")
        text = file.read(length)
    try:
        entries = _entries(text)
    except ValueError as error:
        raise ModelError(f"{path} has a damaged header: {error}. Copy it again.") from error
    if unknown := sorted({entry.code for entry in entries.values()} - set(_DTYPES)):
        raise ModelError(
            f"{path} holds tensors of dtype {', '.join(unknown)}, which cannot be trained or exported. Convert them to "
            "bfloat16 or float32."
        )
    headers = {name: Header(entry.shape, _DTYPES[entry.code]) for name, entry in entries.items()}
    for name, entry in entries.items():
        if entry.end - entry.start != tensor_bytes(headers[name]):
            raise ModelError(f"{path} has a damaged header: {name} has {entry.end - entry.start} bytes. Copy it again.")
    announced = 8 + length + _checked_end(path, entries)
    if announced != size:
        raise ModelError(f"{path} holds {size} bytes, its header announces {announced}. Copy it again.")
    return headers


class _Entry(NamedTuple):
    code: str
    shape: tuple[int, ...]
    start: int
    end: int


def _opened(path: Path) -> IO[bytes]:
    try:
        return open_regular(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error


def _entries(text: bytes) -> dict[str, _Entry]:
    """Return what a header says.

    Raises:
        ValueError: The text is not a header of the format.
    """
    tree = parse_json(text, _without_twice)
    if not isinstance(tree, dict):
        raise ValueError("it is no object")  # noqa: TRY004 - wrong bytes, as everything here
    tree.pop("__metadata__", None)
    return {name: _entry(name, entry) for name, entry in tree.items()}


def _without_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice:.80} stands twice")
    return result


def _entry(name: str, entry: Any) -> _Entry:
    match entry:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [int(start), int(end)]}:
            if all(type(size) is int and size >= 0 for size in shape) and 0 <= start <= end:
                return _Entry(code, tuple(shape), start, end)
    description = f"{entry!r}"
    raise ValueError(
        f"{name:.80} has no dtype, a negative or odd size, or no place that bytes can have: {description:.120}"
    )


def _checked_end(path: Path, entries: Mapping[str, _Entry]) -> int:
    """Return where the last tensor ends.

    Raises:
        ModelError: Tensors share bytes, or there are bytes between them that belong to none.
    """
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            problem = (
                "shares bytes with the tensor before it" if entry.start < end else "has bytes of no tensor before it"
            )
            raise ModelError(f"{path} has a damaged header: {name:.80} {problem}. Copy it again.")
        end = entry.end
    return end


_MOST_NAME_BYTES = 255
"""Longest file name that file systems take."""


def weight_files(directory: Path) -> dict[str, Path]:
    """Return the file that holds each tensor of a model directory.

    Raises:
        ModelError: There are no safetensors files, or one that the index names is missing.
    """
    index = directory / INDEX
    if index.exists():
        try:
            names = _weight_map(read_json(index))
        except (OSError, ValueError) as error:
            raise ModelError(f"{index} is damaged: {type(error).__name__}: {error}. Copy it again.") from error
        missing = sorted({file for file in names.values() if not (directory / file).exists()})
        if missing:
            raise ModelError(
                f"{directory} lacks {', '.join(missing)}, which {INDEX} names. Copy or download the directory again."
            )
        return {name: directory / file for name, file in names.items()}
    single = directory / SINGLE
    if single.exists():
        return dict.fromkeys(read_header(single), single)
    foreign_files = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    hint = (
        f" It has {', '.join(foreign_files[:3])}: load and save it once with transformers to convert."
        if foreign_files
        else " Copy or download the directory again, with its weights."
    )
    raise ModelError(f"{directory} has neither {SINGLE} nor {INDEX}.{hint}")


def _weight_map(tree: Any) -> dict[str, str]:
    """Return the file of each tensor, as an index says it.

    Raises:
        ValueError: The index has another form, or names a file outside of its directory.
    """
    match tree:
        case {"weight_map": dict(names)} if names and all(isinstance(file, str) for file in names.values()):
            endless = next(
                (file for file in names.values() if len(file.encode(errors="replace")) > _MOST_NAME_BYTES), ""
            )
            if endless:
                raise ValueError(f"it names a file of {len(endless):,} characters")
            outside = next((file for file in names.values() if _leads_out(file)), None)
            if outside is not None:
                raise ValueError(f"it names {outside:.120}, which lies outside of its directory")
            return dict(names)
    raise ValueError("it has no weight_map of tensors to files")


def _leads_out(file: str) -> bool:
    return not file or "\0" in file or PurePath(file).is_absolute() or ".." in PurePath(file).parts


class StoredTensors:
    """The tensors of a model directory, read when asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        file_of_tensor = weight_files(directory)
        self._files: dict[str, Path] = {}
        self.headers: dict[str, Header] = {}
        for path in sorted(set(file_of_tensor.values())):
            headers = {
                name: header for name, header in read_header(path).items() if file_of_tensor.get(name, path) == path
            }
            self.headers |= headers
            self._files |= dict.fromkeys(headers, path)
        absent = sorted(set(file_of_tensor) - set(self._files))
        if absent:
            raise ModelError(
                f"{INDEX} says that {absent[0]} is in {file_of_tensor[absent[0]]}, and it is not. Copy the directory "
                "again."
            )
        self._open: tuple[Path, Any] | None = None

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Return a tensor, or the given rows of it."""
        from safetensors import safe_open

        path = self._files[name]
        if self._open is None or self._open[0] != path:
            self._open = (path, safe_open(str(path), framework="pt"))
        if rows is None:
            tensor: Tensor = self._open[1].get_tensor(name)
            return tensor
        selected_rows: Tensor = self._open[1].get_slice(name)[rows]
        return selected_rows


def plan_files(headers: Mapping[str, Header], largest_bytes: int) -> dict[str, list[str]]:
    """Distribute tensors over files in order, none above `largest_bytes` unless a single tensor is.

    Returns:
        Names by file, named as transformers names them.
    """
    files: list[list[str]] = [[]]
    used = 0
    for name, header in headers.items():
        size = tensor_bytes(header)
        if files[-1] and used + size > largest_bytes:
            files.append([])
            used = 0
        files[-1].append(name)
        used += size
    if len(files) == 1:
        return {SINGLE: files[0]}
    total = len(files)
    return {f"model-{index:05d}-of-{total:05d}.safetensors": names for index, names in enumerate(files, start=1)}


def tensor_bytes(header: Header) -> int:
    """Return the size of a tensor's data."""
    return math.prod(header.shape) * header.dtype.itemsize  # torch's own product overflows


def file_bytes(headers: Mapping[str, Header]) -> int:
    """Return the size of a file without notes that `write_file` makes of tensors."""
    return 8 + len(_header_text(headers, None)) + sum(map(tensor_bytes, headers.values()))


def _header_text(headers: Mapping[str, Header], notes: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **(notes or {})}}
    position = 0
    for name, header in headers.items():
        end = position + tensor_bytes(header)
        entries[name] = {"dtype": _CODES[header.dtype], "shape": list(header.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def write_file(
    file: IO[bytes] | RawIOBase,
    headers: Mapping[str, Header],
    tensors: Iterator[tuple[str, Iterator[Tensor]]],
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write one file from tensors that arrive in the order of `headers`; what follows them is left in the iterator.

    Args:
        file: Open for writing.
        headers: Names, shapes and dtypes of its tensors.
        tensors: Names, and each tensor in pieces of consecutive rows.
        notes: Words to keep in the file's header.

    Raises:
        ValueError: A tensor has another name, size or dtype than planned.
    """
    text = _header_text(headers, notes)
    with _BackgroundWriter(file) as writer:
        writer.write(len(text).to_bytes(8, "little") + text)
        for name, header in headers.items():
            tensor_name, pieces = next(tensors)
            remaining = tensor_bytes(header)
            for piece in pieces:
                remaining -= piece.numel() * piece.element_size()
                if tensor_name != name or piece.dtype != header.dtype or remaining < 0:
                    raise ValueError(f"planned {name} {header}, got {tensor_name} {tuple(piece.shape)} {piece.dtype}")
                writer.write(piece.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
                del piece  # the next one is gathered while it has a name
            if remaining:
                raise ValueError(f"planned {name} {header}, and {remaining} bytes of {tensor_name} are missing")


class _BackgroundWriter:
    """Writes one piece in a thread of its own while the next is gathered, and asks the disk to begin at once."""

    def __init__(self, file: IO[bytes] | RawIOBase) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()
        if self._last is not None and error[0] is None:
            self._last.result()

    def write(self, data: bytes | memoryview) -> None:
        """Take the next piece as soon as the one before is written; raise what went wrong with that."""
        if self._last is not None:
            self._last.result()
        self._last = self._thread.submit(self._write, data)

    def _write(self, data: bytes | memoryview) -> None:
        start = self._file.tell()
        self._file.write(data)
        self._file.flush()
        if hasattr(os, "posix_fadvise"):  # starts writing what is not on the disk yet, and waits for nothing
            os.posix_fadvise(self._file.fileno(), start, len(data), os.POSIX_FADV_DONTNEED)


def index_json(files: Mapping[str, list[str]], headers: Mapping[str, Header]) -> str:
    """Return the text of the index of several files."""
    weight_map = {name: file for file, names in files.items() for name in names}
    metadata = {
        "total_parameters": sum(torch.Size(header.shape).numel() for header in headers.values()),
        "total_size": sum(tensor_bytes(header) for header in headers.values()),
    }
    return json.dumps({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, indent=2) + "\n"
