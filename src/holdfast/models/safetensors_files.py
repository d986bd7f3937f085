"""Read and write safetensors files tensor by tensor.

The format (https://github.com/huggingface/safetensors): eight bytes of little-endian header length, a JSON header with
dtype, shape and byte range of every tensor, then the bytes. The library writes a file from a dictionary that holds all
its tensors at once; ours writes each piece of a tensor as it comes, while the next one is on its way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import RawIOBase
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import torch
from torch import Tensor

from holdfast.errors import ModelError
from holdfast.models.conversion import Header

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
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def read_header(path: Path) -> dict[str, Header]:
    """Return what a file holds, and check that its bytes are all there.

    Raises:
        ModelError: The file is cut short or no safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ModelError(f"{path} is no safetensors file, or it is cut short ({size} bytes). Copy it again.")
        text = file.read(length)
    try:
        entries = _entries(text)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} has a damaged header: {type(error).__name__}: {error}. Copy it again.") from error
    if unknown := sorted({entry.code for entry in entries.values()} - set(_DTYPES)):
        raise ModelError(f"{path} holds tensors of dtype {', '.join(unknown)}, which cannot be trained or exported.")
    headers = {name: Header(entry.shape, _DTYPES[entry.code]) for name, entry in entries.items()}
    for name, entry in entries.items():
        if entry.end - entry.start != tensor_bytes(headers[name]):
            raise ModelError(f"{path} has a damaged header: {name} has {entry.end - entry.start} bytes. Copy it again.")
    announced = 8 + length + max((entry.end for entry in entries.values()), default=0)
    if announced != size:
        raise ModelError(f"{path} holds {size} bytes, its header announces {announced}. Copy it again.")
    return headers


class _Entry(NamedTuple):
    code: str
    shape: tuple[int, ...]
    start: int
    end: int


def _entries(text: bytes) -> dict[str, _Entry]:
    tree: dict[str, Any] = json.loads(text)
    tree.pop("__metadata__", None)
    return {
        name: _Entry(str(entry["dtype"]), tuple(map(int, entry["shape"])), *map(int, entry["data_offsets"]))
        for name, entry in tree.items()
    }


def weight_files(directory: Path) -> dict[str, Path]:
    """Return the file that holds each tensor of a model directory.

    Raises:
        ModelError: There are no safetensors files, or one that the index names is missing.
    """
    index = directory / INDEX
    if index.exists():
        try:
            names: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, TypeError, KeyError) as error:
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
    other = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    hint = f" It has {', '.join(other[:3])}: load and save it once with transformers to convert." if other else ""
    raise ModelError(f"{directory} has neither {SINGLE} nor {INDEX}.{hint}")


class StoredTensors:
    """The tensors of a model directory, read when asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        named = weight_files(directory)
        self._files: dict[str, Path] = {}
        self.headers: dict[str, Header] = {}
        for path in sorted(set(named.values())):
            held = {name: header for name, header in read_header(path).items() if named.get(name, path) == path}
            self.headers |= held
            self._files |= dict.fromkeys(held, path)
        absent = sorted(set(named) - set(self._files))
        if absent:
            raise ModelError(
                f"{INDEX} says that {absent[0]} is in {named[absent[0]]}, and it is not. Copy the directory again."
            )
        self._open: tuple[Path, Any] | None = None

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Return a tensor, or the given rows of it."""
        from safetensors import safe_open

        path = self._files[name]
        if self._open is None or self._open[0] != path:
            self._open = (path, safe_open(str(path), framework="pt"))
        if rows is None:
            whole: Tensor = self._open[1].get_tensor(name)
            return whole
        part: Tensor = self._open[1].get_slice(name)[rows]
        return part


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
    return torch.Size(header.shape).numel() * header.dtype.itemsize


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
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **(notes or {})}}
    position = 0
    for name, header in headers.items():
        end = position + tensor_bytes(header)
        entries[name] = {"dtype": _CODES[header.dtype], "shape": list(header.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _Behind(file) as behind:
        behind.write(len(text).to_bytes(8, "little") + text)
        for name, header in headers.items():
            given, pieces = next(tensors)
            left = tensor_bytes(header)
            for piece in pieces:
                left -= piece.numel() * piece.element_size()
                if given != name or piece.dtype != header.dtype or left < 0:
                    raise ValueError(f"planned {name} {header}, got {given} {tuple(piece.shape)} {piece.dtype}")
                behind.write(piece.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
                del piece  # the next one is gathered while it has a name
            if left:
                raise ValueError(f"planned {name} {header}, and {left} bytes of {given} are missing")


class _Behind:
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
