"""The files that hold a checkpoint's tensors: safetensors, in the layout of torch's distributed writer of that format.

    tensors/shard-00001-model-00001-of-00001.safetensors    what rank 0 wrote; a file per rank

A file is eight bytes of header length, a JSON header, and chunks of tensors, one after the other. A file holds at most
one chunk of a tensor; `DCP_SHARDING_INFO` in the header says where the chunk begins in the tensor. The readers of
safetensors and of torch (`safe_open`, `torch.distributed.checkpoint.HuggingFaceStorageReader`) take such files.

Everything that a header says follows from the manifest. It is therefore computed and compared, byte for byte, and never
parsed: a header cannot lie about sizes or places.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from typing import NamedTuple

import torch

from holdfast.checkpoint.format.manifest import Chunk, Manifest
from holdfast.checkpoint.place.layout import TENSORS

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Codes of dtypes. Tensors of others are stored as bytes, U8 with one more dimension: an element's bytes."""
_BYTES = "U8"


class Piece(NamedTuple):
    """A chunk of a tensor to be stored in a file."""

    key: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def bytes_(self) -> int:
        """Size in the file."""
        return prod(self.sizes) * self.dtype.itemsize


class Stored(NamedTuple):
    """A chunk in a file."""

    piece: Piece
    start: int
    """Offset in the file, in bytes."""


class ShardLayout(NamedTuple):
    """The layout of one file: its first bytes, and where each chunk is."""

    header: bytes
    """Length and text of the header."""
    chunks: tuple[Stored, ...]
    """In the order of the file."""
    size: int
    """Of the whole file, in bytes."""


def shard_file(number: int) -> str:
    """Return the path, in a checkpoint, of the file that a rank writes."""
    return f"{TENSORS}/shard-{number + 1:05d}-model-00001-of-00001.safetensors"


def shard_layout(pieces: Iterable[Piece]) -> ShardLayout:
    """Return the layout of a file, which depends on the set of its pieces alone.

    Larger elements come first, so that every chunk is aligned.

    Raises:
        ValueError: Two pieces are of one tensor.
    """
    ordered = sorted(pieces, key=lambda piece: (-_itemsize(piece.dtype), piece.key))
    entries: dict[str, object] = {}
    sharding, position = {}, 0
    for piece in ordered:
        if piece.key in entries:
            raise ValueError(f"two chunks of {piece.key} are in one file")
        inner = () if piece.dtype in _CODES else (piece.dtype.itemsize,)
        end = position + piece.bytes_
        entries[piece.key] = {
            "dtype": _CODES.get(piece.dtype, _BYTES),
            "shape": [*piece.sizes, *inner],
            "data_offsets": [position, end],
        }
        sharding[piece.key] = {
            "saved_offsets": [*piece.offsets, *(0 for _ in inner)],
            "global_shape": [*piece.shape, *inner],
            "dtype": str(piece.dtype).removeprefix("torch."),
        }
        position = end
    notes = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": _compact(sharding)}
    text = _compact({"__metadata__": notes, **entries}).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    starts = [len(header)]
    for piece in ordered:
        starts.append(starts[-1] + piece.bytes_)
    return ShardLayout(header, tuple(map(Stored, ordered, starts)), starts[-1])


def _itemsize(dtype: torch.dtype) -> int:
    return dtype.itemsize if dtype in _CODES else 1


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def layouts_of(manifest: Manifest) -> dict[str, ShardLayout]:
    """Return the layout of each of a checkpoint's files of tensors.

    Raises:
        ValueError: The manifest puts two chunks of one tensor into one file.
    """
    pieces: dict[str, list[Piece]] = {file: [] for file in manifest.files if file.startswith(f"{TENSORS}/")}
    for key, entry in manifest.tensors.items():
        dtype = getattr(torch, entry.dtype)
        for chunk in entry.chunks:
            pieces[chunk.file].append(Piece(key, entry.shape, dtype, chunk.offsets, chunk.sizes))
    return {file: shard_layout(file_pieces) for file, file_pieces in pieces.items()}


def hashes_of(manifest: Manifest) -> dict[tuple[str, str], str]:
    """Return the hash of each chunk by file and tensor."""
    return {(chunk.file, key): chunk.hash for key, entry in manifest.tensors.items() for chunk in entry.chunks}


def overlap(
    offsets: tuple[int, ...], sizes: tuple[int, ...], other_offsets: tuple[int, ...], other_sizes: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return offsets and sizes of the elements that two chunks of a tensor share; None if they share none."""
    starts = tuple(map(max, offsets, other_offsets))
    ends = tuple(
        min(start + size, other + other_size)
        for start, size, other, other_size in zip(offsets, sizes, other_offsets, other_sizes, strict=True)
    )
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return None
    return starts, tuple(end - start for start, end in zip(starts, ends, strict=True))


def gap(shape: tuple[int, ...], chunks: Iterable[Chunk]) -> str | None:
    """Return in which way chunks do not tile a tensor; None if they do."""
    if any(size < 0 for size in shape) or prod(max(size, 1) for size in shape) >= 2**63:  # torch's limit of strides
        return f"no tensor has the shape {list(shape)}"
    ordered = sorted(chunks, key=lambda chunk: (chunk.offsets, chunk.sizes))
    outside = next((chunk for chunk in ordered if not _is_inside(chunk, shape)), None)
    if outside is not None:
        return f"a chunk at {list(outside.offsets)} of {list(outside.sizes)} lies outside of {list(shape)}"
    covered = sum(prod(chunk.sizes) for chunk in ordered)
    if covered != prod(shape):
        return f"its chunks hold {covered} elements of {prod(shape)}"
    shared = _first_shared(ordered)
    return None if shared is None else f"two of its chunks share elements at {list(shared.offsets)}"


def _is_inside(chunk: Chunk, shape: tuple[int, ...]) -> bool:
    return len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
        start >= 0 and size >= 0 and start + size <= end
        for start, size, end in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )


def _first_shared(ordered: Iterable[Chunk]) -> Chunk | None:
    """Return the first chunk that shares elements with an earlier one; chunks come in the order of their offsets."""
    reaching: list[Chunk] = []
    for chunk in ordered:
        # Only chunks that reach this one's rows can share elements with it.
        reaching = [each for each in reaching if not each.sizes or each.offsets[0] + each.sizes[0] > chunk.offsets[0]]
        if any(overlap(chunk.offsets, chunk.sizes, each.offsets, each.sizes) for each in reaching):
            return chunk
        reaching.append(chunk)
    return None


def check_layout(manifest: Manifest) -> dict[str, ShardLayout]:
    """Return the layouts of a checkpoint's files of tensors, after comparing what the manifest says with itself.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: Chunks do not tile a tensor, a dtype is unknown, or a file is
            missing or has another size.
    """
    for key, entry in manifest.tensors.items():
        if not isinstance(getattr(torch, entry.dtype), torch.dtype):
            raise TypeError(f"{key} has the dtype {entry.dtype}")
        wrong = gap(entry.shape, entry.chunks)
        if wrong is not None:
            raise ValueError(f"{key}: {wrong}")
    layouts = layouts_of(manifest)
    for file, layout in layouts.items():
        if manifest.files[file].size != layout.size:
            raise ValueError(f"{file} has {manifest.files[file].size} bytes, its tensors make {layout.size}")
    return layouts


def pieces_by_rank(held: list[Mapping[str, Piece]]) -> list[list[Piece]]:
    """Return the pieces that each rank writes: of equal copies on several ranks, one, by the rank with the least.

    Args:
        held: For each rank, its piece of each tensor.
    """
    holders: dict[Piece, list[int]] = {}
    for rank, pieces in enumerate(held):
        for piece in pieces.values():
            holders.setdefault(piece, []).append(rank)
    written: list[list[Piece]] = [[] for _ in held]
    sizes = [0] * len(held)
    for piece, ranks in sorted(holders.items(), key=lambda item: len(item[1])):  # what has one holder comes first
        rank = min(ranks, key=sizes.__getitem__)
        written[rank].append(piece)
        sizes[rank] += piece.bytes_
    return written
