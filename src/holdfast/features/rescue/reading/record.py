"""The records that readers of other systems' checkpoints return; tensors have canonical names and are read lazily."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from holdfast.checkpoint.place.memory import new_memory
from holdfast.errors import UserError
from holdfast.text.shortening import shortened

FindingKind = Literal["damage", "unverified", "repair", "loss", "note"]
StateKind = Literal["weights", "optimizer"]
"""What a rank's files hold."""
CheckpointVerdict = Literal["whole", "cannot be told", "damaged"]
TRAINER = "transformers' Trainer (or TRL)"
"""The name of a system whose groups of parameters are known."""


class UnreadableForeign(UserError):  # noqa: N818 - the name says what is wrong
    """A directory of another system cannot be read; nothing was changed."""


class DamagedFile(Exception):  # noqa: N818 - the name says what is wrong
    """One file is damaged. The message continues a sentence that begins with the file's name."""


MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError, MemoryError)
"""What readers raise where a value has another form than its system writes."""
_SCALARS = (bool, int, float, str, torch.dtype, type(None))
_MOST = 2**53
"""The largest step, pass or row: beyond it, a float cannot represent every integer."""


def never_written(source: object, error: BaseException) -> str:
    """Return the message for a value that its system never writes; of the error, only short texts are quoted."""
    said = shortened(" ".join(text for text in error.args if isinstance(text, str)), 120)
    return f"{source} holds what its system never writes: {type(error).__name__} {said}".rstrip(" .")


def refuse_outside(path: Path, within: Path) -> None:
    """Refuse a file or a directory that a link puts somewhere else.

    Raises:
        DamagedFile: It lies outside of the directory it seems to be in.
    """
    if not path.resolve().is_relative_to(within.resolve()):
        raise DamagedFile("is a link that leads out of its directory")


def counted(value: object, quantity: str) -> int:
    """Return a step, a pass or a number of rows, which is a whole number from 0 to 2**53.

    Raises:
        DamagedFile: It is something else.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is int and 0 <= value <= _MOST:
        return value
    text = (
        f"{value!r}" if isinstance(value, float) or (type(value) is int and abs(value) <= _MOST) else "no such number"
    )
    raise DamagedFile(f"holds what its system never writes: {quantity} is {text}")


@dataclass(frozen=True)
class TensorPiece:
    """A block of a tensor that lies in one file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[Tensor], object]
    """Writes its numbers into a tensor of [*sizes] and its dtype."""
    file: str
    """Its file, for messages."""

    def read(self) -> Tensor:
        """Read the block into new memory and return it."""
        tensor = new_memory(self.file, self.sizes, self.dtype)
        self.fill(tensor)
        return tensor


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in another system's files; its pieces tile it, unless `gap` says otherwise."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[TensorPiece, ...]
    copies: tuple[TensorPiece, ...] = ()
    """The same blocks as pieces, where several ranks store them."""
    flat: bool = False
    """Whether pieces are runs of the tensor's elements in row-major order, as FSDP1 cuts them."""

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """Return the whole tensor; pieces are read into their place in it, and compared with their copies.

        Raises:
            DamagedFile: A piece is damaged, or a copy of it has other numbers.
        """
        file = self.pieces[0].file if self.pieces else "the checkpoint"
        tensor = new_memory(file, (math.prod(self.shape),) if self.flat else self.shape, self.dtype)
        for piece in self.pieces:
            ranges = zip(piece.offsets, piece.sizes, strict=True)
            part = tensor[tuple(slice(start, start + size) for start, size in ranges)]
            piece.fill(part)
            for copy in self.copies_of(piece):
                if not have_same_bytes(copy.read(), part):
                    raise DamagedFile(f"{piece.file} has other numbers than {copy.file}: copies on two ranks diverged")
        return tensor.reshape(self.shape)

    def copies_of(self, piece: TensorPiece) -> Iterator[TensorPiece]:
        """Yield the copies of a piece on other ranks."""
        if 0 not in piece.sizes:
            yield from (copy for copy in self.copies if (copy.offsets, copy.sizes) == (piece.offsets, piece.sizes))

    def gap(self) -> str | None:
        """Return in words what the pieces leave out or hold twice; None if they tile the tensor."""
        total = math.prod(self.shape)
        space = (total,) if self.flat else self.shape
        nonempty = [piece for piece in self.pieces if 0 not in piece.sizes]
        covered = sum(math.prod(piece.sizes) for piece in nonempty)
        if covered != total:
            return f"its parts hold {covered:,} of {total:,} elements"
        if not all(_is_inside(piece, space) for piece in nonempty):
            return "one part of it lies outside of its shape"
        if _any_overlap(nonempty):
            return "some of it is there twice and some is not: its parts overlap"
        return None


def have_same_bytes(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal bit by bit: 0.0 is not -0.0, and a NaN is itself."""
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


def _is_inside(piece: TensorPiece, space: tuple[int, ...]) -> bool:
    if not len(piece.offsets) == len(piece.sizes) == len(space):
        return False
    ranges = zip(piece.offsets, piece.sizes, space, strict=True)
    return all(start >= 0 and size >= 0 and start + size <= extent for start, size, extent in ranges)


def _any_overlap(pieces: Sequence[TensorPiece]) -> bool:
    """Return whether two pieces share an element: a sweep along the dimension that is cut most."""
    axes = range(len(pieces[0].sizes) if pieces else 0)
    axis = max(axes, key=lambda axis: len({piece.offsets[axis] for piece in pieces}), default=None)
    if axis is None:
        return len(pieces) > 1
    reaching: list[TensorPiece] = []
    for piece in sorted(pieces, key=lambda piece: piece.offsets[axis]):
        reaching = [
            earlier for earlier in reaching if earlier.offsets[axis] + earlier.sizes[axis] > piece.offsets[axis]
        ]
        if any(_overlap(piece, earlier) for earlier in reaching):
            return True
        reaching.append(piece)
    return False


def _overlap(first: TensorPiece, second: TensorPiece) -> bool:
    pairs = zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True)
    return all(start < begin + length and begin < start + size for start, size, begin, length in pairs)


@dataclass(frozen=True)
class StoredGroup:
    """A param group of an optimizer."""

    names: tuple[str, ...]
    """Names of its parameters; a parameter without a known name is left out."""
    settings: Mapping[str, Any]


def plain_settings(settings: Mapping[str, Any]) -> str:
    """Return the same text for equal settings. Nested values are left out, since they may refer to themselves."""
    plain = {key: value for key, value in settings.items() if isinstance(value, _SCALARS)}
    pairs = {key: value for key, value in settings.items() if isinstance(value, tuple) and len(value) <= 4}
    flat = {key: value for key, value in pairs.items() if all(isinstance(element, _SCALARS) for element in value)}
    return repr(sorted((plain | flat).items()))


@dataclass(frozen=True)
class Position:
    """The position in the data, as far as the system states it."""

    epoch: int | None
    """Whole passes that were done; None where only the step says something of them."""
    rows: int | None = None
    """Rows drawn in the pass that was going on, over all ranks."""
    batches: int | None = None
    """Batches drawn in it, where their size is not known."""
    share: float | None = None
    """The fraction of the pass that was done, where nothing else is known."""


@dataclass(frozen=True)
class ForeignFinding:
    """A finding of the examination, for a person."""

    kind: FindingKind
    text: str
    there: bool = True
    """For a loss: whether the other system's own resume loses it too."""


@dataclass
class ForeignCheckpoint:
    """A checkpoint of another system."""

    system: str
    form: str
    path: Path
    world_size: int | None = None
    step: int | None = None
    weights: dict[str, StoredTensor] = field(default_factory=dict)
    tied_away: dict[str, str] = field(default_factory=dict)
    """Names of weights that are another name's tensor -> that name."""
    states: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)
    """Parameter -> key -> tensor; a parameter without an entry has no state."""
    groups: list[StoredGroup] = field(default_factory=list)
    has_optimizer: bool = False
    step_is_updates: bool = False
    """Whether its step counts the optimizer's updates; verl's does not where a step has several."""
    schedule: Mapping[str, Any] | None = None
    schedule_step: int | None = None
    """The schedule's step, in a system whose schedule may count several updates per step."""
    position: Position | None = None
    random_state: bool = False
    """Whether it holds the state of random generators."""
    model_files: Path | None = None
    """Directory with config.json."""
    findings: list[ForeignFinding] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    """Weight -> what it is called there."""
    is_in_model_order: bool = True
    """Whether `weights` has the order of the model's parameters; safetensors lists them by name."""
    compare_rest: dict[Path, Callable[[], None]] = field(default_factory=dict)
    """File -> what compares those of its bytes with their checksums that no tensor was read from."""
    without_checksums: set[str] = field(default_factory=set)
    """Files of numbers that were opened and have no checksums."""
    untold_order: set[StateKind] = field(default_factory=set)
    """Kinds of files that do not say which rank wrote them; they are joined in the order of their names."""
    shares: tuple[int, ...] = ()
    """Of each rank, which share of the weights it holds; ranks with one share hold copies. Empty if nothing says so."""
    empty_ranks: dict[str, frozenset[int]] = field(default_factory=dict)
    """Weight -> the ranks that hold no element of it."""
    has_two_models: bool = False
    """Whether a second weight of some name was refused."""

    def add(self, kind: FindingKind, *texts: str, there: bool = True) -> None:
        """Note findings."""
        self.findings += [ForeignFinding(kind, text.removesuffix("."), there) for text in texts]

    @contextmanager
    def naming(self, label: str) -> Iterator[None]:
        """Note damage of what is read meanwhile under a label: a file, or a tensor."""
        try:
            yield
        except (DamagedFile, OSError) as error:
            self.add("damage", f"{label} {error}".strip())

    def add_weight(self, name: str, tensor: StoredTensor, source: str) -> None:
        """Add a weight; a second one of its name is damage, of which the first is told.

        Args:
            name: Its canonical name.
            tensor: Its numbers.
            source: What it is called there.
        """
        first = self.sources.setdefault(name, source)
        if name in self.weights and first != source:
            if not self.has_two_models:
                message = f"two weights are called {name}: {first} and {source}; which of them is meant nobody can say"
                self.add("damage", message)
            self.has_two_models = True
            return
        self.weights[name] = tensor

    def of_kind(self, kind: FindingKind) -> Sequence[ForeignFinding]:
        """Return the findings of one kind."""
        return [finding for finding in self.findings if finding.kind == kind]

    @property
    def verdict(self) -> CheckpointVerdict:
        """What an examination came to: whole is said only where all bytes that are read were compared."""
        if self.of_kind("damage"):
            return "damaged"
        return "cannot be told" if self.of_kind("unverified") else "whole"

    @property
    def trained(self) -> frozenset[str]:
        """Parameters with optimizer state."""
        return frozenset(self.states)


def in_a_row(pieces: Sequence[TensorPiece], dim: int = 0) -> tuple[TensorPiece, ...]:
    """Return pieces one behind another along a dimension, whatever their offsets were."""
    placed, start = [], 0
    for piece in pieces:
        offsets = tuple(start if axis == dim else 0 for axis in range(len(piece.sizes)))
        placed.append(replace(piece, offsets=offsets))
        start += piece.sizes[dim] if piece.sizes else 0
    return tuple(placed)
