"""manifest.json lists every file and tensor of a checkpoint with its hash; a directory without a valid one is none.

The manifest is canonical JSON (sorted keys, no spaces) and ends with the hash of everything before it. Duplicate keys,
trailing bytes and unlisted files are errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar

from holdfast.checkpoint.errors import CheckpointCorrupt
from holdfast.checkpoint.place.hashing import hash_bytes
from holdfast.errors import UserError
from holdfast.files import parse_json, size_words

T = TypeVar("T")

FORMAT = 3
"""The format that is written and read: tensors are in safetensors files."""
NAME = "manifest.json"
_HASH_KEY = "xxh3_128"
"""Key of the hash; it sorts after `manifest`, so that the file ends with its hash."""


class OtherFormat(UserError):  # noqa: N818 - the name says what is wrong
    """A checkpoint of a later version of Holdfast, or of an earlier one that was not converted."""


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
    """Hash of the chunk's bytes in row-major order."""
    file: str
    """The file that holds it."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]
    """They tile the tensor."""
    requires_grad: bool = False
    """Whether the tensor is a parameter that was trained."""


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json: everything about a checkpoint but the values of its tensors."""

    run_id: str
    """Identity of the run; of a loop of one's own, the directory of its checkpoints."""
    step: int
    """Number of updates done."""
    contents: tuple[str, ...]
    """Which of model, adapter, optimizer, trainer, rank and companions the checkpoint holds."""
    files: Mapping[str, FileEntry]
    """Files by path relative to the checkpoint; the manifest itself is not listed."""
    tensors: Mapping[str, TensorEntry]
    """Tensors by their stored names: model.<parameter> and optim.<parameter>.<key>"""
    ties: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Other names of a tied parameter, by its canonical name."""
    optimizer: Mapping[str, Any] | None = None
    """Class of the optimizer, its groups, its values that are not tensors, and records of quantised tensors."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Axis name to size."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of Python and of libraries by name."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Metrics of this step; None where a number was not finite."""
    parent: str | None = None
    """Hash of the manifest of the checkpoint this run saved or loaded before."""
    parent_step: int | None = None
    """Step of that checkpoint."""
    finite: bool = True
    """Whether no tensor holds NaN or infinity."""
    deviations: tuple[str, ...] = ()
    """Deviations that were declared at the resumes of the run so far, the earliest first."""
    fingerprints: Mapping[str, Any] = field(default_factory=dict)
    """Fingerprints of data, user files, tokenizer and chat template."""
    seconds: float = 0.0
    """Duration of the save until the manifest was written."""
    format: int = FORMAT
    """Number of the format of checkpoints."""

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
    """The fields of a manifest besides files and tensors."""

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

    Raises:
        CheckpointCorrupt: The manifest is damaged in any way.
        OtherFormat: A later version wrote it, or an earlier one.
    """
    return parse_as(FORMAT, data, path, lambda body: body)


def parse_as(number: int, data: bytes, path: str, present: Callable[[Any], Any]) -> Manifest:
    """Read a manifest of one format.

    Every format keeps the envelope: canonical JSON of `manifest` and of its hash.

    Args:
        number: The format that is expected.
        data, path: The file.
        present: Turns a manifest of that format, as JSON, into one of the present format.

    Raises:
        CheckpointCorrupt: The manifest is damaged in any way.
        OtherFormat: It has another format.
    """
    try:
        outer = parse_json(data, _no_duplicates)
        body = outer["manifest"]
        if hash_bytes(_canonical(body)) != outer[_HASH_KEY] or _canonical(outer) != data:
            raise CheckpointCorrupt(f"{path} is damaged: its own hash does not fit.")
        # Looked at after the hash: a flipped bit must not look like another version.
        if type(body["format"]) is int and body["format"] != number:
            raise OtherFormat(_other_format(path, body["format"]))
        return _manifest_of(present(body))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) and error.args else error
        raise CheckpointCorrupt(f"{path} is damaged: {reason}.") from error


def _other_format(path: str, number: int) -> str:
    if number > FORMAT:
        return f"{path} has format {number}, this version of Holdfast reads format {FORMAT}. Upgrade Holdfast."
    directory = path.removesuffix(f"/{NAME}")
    return (
        f"{path} has format {number}, this version of Holdfast reads format {FORMAT}. Convert it with `holdfast "
        f"checkpoint convert {directory}`, which keeps every number, and start the same command again."
    )


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice")
    return result


def _manifest_of(body: Mapping[str, Any]) -> Manifest:
    field_names = {manifest_field.name for manifest_field in fields(Manifest)}
    if set(body) != field_names:
        raise ValueError(f"its fields differ: {sorted(set(body) ^ field_names)}")
    values = dict(body)
    values["files"] = {name: _file(FileEntry(**entry)) for name, entry in body["files"].items()}
    values["tensors"] = {name: _tensor(entry) for name, entry in body["tensors"].items()}
    values["contents"] = tuple(_all(str, body["contents"]))
    values["ties"] = {name: tuple(_all(str, aliases)) for name, aliases in body["ties"].items()}
    values["deviations"] = tuple(_all(str, body["deviations"]))
    _check_plain(body)
    if body["optimizer"] is not None:
        _check_optimizer(_typed(dict, body["optimizer"]))
    return Manifest(**values)


def _check_plain(body: Mapping[str, Any]) -> None:
    """Check the types of the fields that are plain values or mappings of them.

    Raises:
        TypeError: One has another type.
    """
    for name, kind in (("run_id", str), ("step", int), ("format", int), ("finite", bool)):
        _typed(kind, body[name])
    for name, optional in (("parent", str), ("parent_step", int)):
        if body[name] is not None:
            _typed(optional, body[name])
    _all(int, _typed(dict, body["mesh"]).values())
    _all(str, _typed(dict, body["versions"]).values())
    _typed(dict, body["fingerprints"])
    for value in (body["seconds"], *(value for value in _typed(dict, body["metrics"]).values() if value is not None)):
        if type(value) not in {int, float}:
            raise TypeError(f"{value!r:.40} is not a number")


def _check_optimizer(section: Mapping[str, Any]) -> None:
    """Check the fields of `optimizer` that are read; a correct hash does not imply that they are well-formed.

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
        _typed(dict, keys)


def _file(entry: FileEntry) -> FileEntry:
    return FileEntry(_typed(int, entry.size), _typed(str, entry.hash))


def _tensor(entry: Mapping[str, Any]) -> TensorEntry:
    chunks = tuple(
        Chunk(
            _numbers(chunk["offsets"]),
            _numbers(chunk["sizes"]),
            _typed(str, chunk["hash"]),
            _typed(str, chunk["file"]),
        )
        for chunk in entry["chunks"]
    )
    shape, dtype = _numbers(entry["shape"]), _typed(str, entry["dtype"])
    return TensorEntry(shape, dtype, chunks, _typed(bool, entry["requires_grad"]))


def _typed(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} is not of the type {kind.__name__}")
    return value


def _all(kind: type[T], values: Any) -> list[T]:
    return [_typed(kind, value) for value in values]


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise TypeError("a shape is not a list of integers")
    return tuple(values)
