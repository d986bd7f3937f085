"""manifest.json: what a checkpoint holds, byte for byte; a directory is a checkpoint if and only if it fits.

The manifest is canonical JSON (sorted keys, no spaces) and ends with the hash of everything before. Duplicate keys,
trailing bytes and unlisted files are errors: nothing about a checkpoint is left to the reader's good will.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from holdfast.checkpoint.errors import CheckpointCorrupt
from holdfast.checkpoint.place.hashing import hash_bytes
from holdfast.errors import UserError
from holdfast.files import parse_json, size_words

FORMAT = 2
"""The format that is written, and the newest that is read."""
NAME = "manifest.json"
_HASH_KEY = "xxh3_128"
"""Sorts behind `manifest`, so that the file ends with its hash."""


class NewerFormat(UserError):  # noqa: N818 - the name says what is wrong
    """A checkpoint was written by a later version of Holdfast."""


@dataclass(frozen=True)
class FileEntry:
    """One file."""

    size: int
    hash: str


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a tensor, as one rank held it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    hash: str
    """Of its bytes in row-major order, before anything was serialised."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]
    """They tile the tensor."""
    requires_grad: bool = False
    """Of a parameter: whether it was trained."""


@dataclass(frozen=True)
class Manifest:
    """Everything known of a checkpoint without reading a tensor."""

    run_id: str
    step: int
    contents: tuple[str, ...]
    """Of model, adapter, optimizer, trainer, rank."""
    files: Mapping[str, FileEntry]
    """By path relative to the checkpoint; the manifest itself is not listed."""
    tensors: Mapping[str, TensorEntry]
    """Under the names of the DCP inside: model.<parameter> and optim.<parameter>.<key>"""
    ties: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    """Class, groups, values that are not tensors, and what quantised tensors are besides their parts."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Axis name to size."""
    versions: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Of this step; null where a number was not finite."""
    parent: str | None = None
    """Hash of the manifest of the checkpoint this run saved or loaded before."""
    parent_step: int | None = None
    finite: bool = True
    """No NaN or infinity in any tensor."""
    deviations: tuple[str, ...] = ()
    """What was declared at any resume of the run so far, the earliest first."""
    fingerprints: Mapping[str, Any] = field(default_factory=dict)
    """Of data, user files, tokenizer and template."""
    seconds: float = 0.0
    """How long the save took until here."""
    format: int = FORMAT

    def __repr__(self) -> str:
        """Return one line: the names and hashes of every file and tensor fill screens."""
        contents = ", ".join(self.contents)
        return (
            f"<Manifest of step {self.step} of run {self.run_id[:8]}: {contents}; {len(self.tensors)} tensors, "
            f"{len(self.files)} files, {size_words(self.bytes_)}>"
        )

    def to_json(self) -> bytes:
        """Return the file's bytes."""
        body = _canonical(asdict(self))
        return _canonical({"manifest": json.loads(body), _HASH_KEY: hash_bytes(body)})

    @cached_property
    def hash(self) -> str:
        """Identity of the checkpoint."""
        return hash_bytes(_canonical(asdict(self)))

    @property
    def bytes_(self) -> int:
        """Size of all listed files."""
        return sum(entry.size for entry in self.files.values())


@dataclass(frozen=True)
class About:
    """What a manifest says besides files and tensors."""

    run_id: str
    step: int
    parent: str | None = None
    parent_step: int | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    deviations: tuple[str, ...] = ()
    fingerprints: Mapping[str, Any] = field(default_factory=dict)


def parse(data: bytes, path: str) -> Manifest:
    """Read a manifest.

    Every format keeps the envelope: canonical JSON of `manifest` and of its hash.

    Raises:
        CheckpointCorrupt: The manifest is damaged in any way.
        NewerFormat: A later version wrote it.
    """
    try:
        outer = parse_json(data, _no_duplicates)
        body = outer["manifest"]
        if hash_bytes(_canonical(body)) != outer[_HASH_KEY] or _canonical(outer) != data:
            raise CheckpointCorrupt(f"{path} is damaged: its own hash does not fit.")
        number = body["format"]  # looked at after the hash: a flipped bit must not look like a later version
        if isinstance(number, int) and number > FORMAT:
            raise NewerFormat(
                f"{path} has format {number}, this version of Holdfast reads up to {FORMAT}. Upgrade Holdfast."
            )
        return _from_plain(body)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) and error.args else error
        raise CheckpointCorrupt(f"{path} is damaged: {reason}.") from error


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice")
    return result


def _from_plain(body: Mapping[str, Any]) -> Manifest:
    field_names = {manifest_field.name for manifest_field in fields(Manifest)}
    if set(body) != field_names:
        raise ValueError(f"its fields differ: {sorted(set(body) ^ field_names)}")
    values = dict(body)
    values["files"] = {name: FileEntry(**entry) for name, entry in body["files"].items()}
    values["tensors"] = {name: _tensor(entry) for name, entry in body["tensors"].items()}
    values["contents"] = tuple(body["contents"])
    values["ties"] = {name: tuple(aliases) for name, aliases in body["ties"].items()}
    values["deviations"] = tuple(body["deviations"])
    if body["optimizer"] is not None:
        _check_optimizer(body["optimizer"])
    return Manifest(**values)


def _check_optimizer(section: Mapping[str, Any]) -> None:
    """Look at what is read of an optimizer: the hash fits whatever somebody wrote and hashed anew.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: It is another shape, or lacks an entry.
    """
    if not isinstance(section["kind"], str):
        raise TypeError("the optimizer's kind is no text")
    for group in section["groups"]:
        if not all(isinstance(name, str) for name in group["parameters"]):
            raise TypeError("a group of the optimizer names no parameters")
        group["hyperparameters"].items()
    for keys in (*section["values"].values(), *section.get("wrapped", {}).values()):
        keys.items()


def _tensor(entry: Mapping[str, Any]) -> TensorEntry:
    chunks = tuple(Chunk(tuple(chunk["offsets"]), tuple(chunk["sizes"]), chunk["hash"]) for chunk in entry["chunks"])
    return TensorEntry(tuple(entry["shape"]), entry["dtype"], chunks, entry["requires_grad"])
