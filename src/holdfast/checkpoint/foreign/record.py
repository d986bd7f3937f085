"""What every reader of another system's checkpoint returns: tensors by canonical name, read when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from holdfast.checkpoint.place.memory import new_memory
from holdfast.errors import UserError

Kind = Literal["damage", "repair", "loss", "note"]


class UnreadableForeign(UserError):  # noqa: N818 - the name says what is wrong
    """A directory of another system that cannot be taken as it is; nothing was changed."""


class DamagedFile(Exception):  # noqa: N818 - the name says what is wrong
    """One file is not what its system writes; the message begins behind the file's name."""


@dataclass(frozen=True)
class TensorPiece:
    """A part of a tensor that lies in one place."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[Tensor], object]
    """Writes its numbers into a tensor of [*sizes] and its dtype."""
    file: str
    """Its file, for messages."""

    def read(self) -> Tensor:
        """Return the part, in memory of its own."""
        part = new_memory(self.file, self.sizes, self.dtype)
        self.fill(part)
        return part


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in another system's files; its pieces tile it, but for the doubts of `gaps`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[TensorPiece, ...]
    copies: tuple[TensorPiece, ...] = ()
    """Of a tensor that every rank has: those of the other ranks."""
    flat: bool = False
    """Whether pieces are runs of the tensor's elements in row-major order, as FSDP1 cuts them."""

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """Return the whole tensor; pieces are read into their place in it."""
        where = self.pieces[0].file if self.pieces else "the checkpoint"
        whole = new_memory(where, (math.prod(self.shape),) if self.flat else self.shape, self.dtype)
        for piece in self.pieces:
            ranges = zip(piece.offsets, piece.sizes, strict=True)
            piece.fill(whole[tuple(slice(start, start + size) for start, size in ranges)])
        return whole.reshape(self.shape)

    def gap(self) -> str | None:
        """Return in words what the pieces leave out or hold twice; None if they tile the tensor."""
        covered = sum(math.prod(piece.sizes) for piece in self.pieces)
        total = math.prod(self.shape)
        if covered != total:
            return f"its parts hold {covered:,} of {total:,} elements"
        if len({piece.offsets for piece in self.pieces if 0 not in piece.sizes}) != sum(
            0 not in piece.sizes for piece in self.pieces
        ):
            return "one part of it is there twice and another is not"
        return None


@dataclass(frozen=True)
class StoredGroup:
    """A param group of an optimizer."""

    names: tuple[str, ...]
    """Of its parameters; those that nobody could name are left out."""
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Position:
    """Where its data stood, as far as the system says."""

    epoch: int
    """Whole passes that were done."""
    rows: int | None = None
    """Rows drawn in the pass that was going on, over all ranks."""
    batches: int | None = None
    """Batches drawn in it, where their size is not known."""
    share: float | None = None
    """The part of it that was done, where nothing else is known."""


@dataclass(frozen=True)
class ForeignFinding:
    """One thing that a person should know."""

    kind: Kind
    text: str
    there: bool = True
    """Of a loss: whether the other system's own resume loses it too."""


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
    schedule: Mapping[str, Any] | None = None
    position: Position | None = None
    random_state: bool = False
    """Whether it holds the state of random generators."""
    model_files: Path | None = None
    """Directory with config.json."""
    findings: list[ForeignFinding] = field(default_factory=list)

    def add(self, kind: Kind, *texts: str, there: bool = True) -> None:
        """Note findings."""
        self.findings += [ForeignFinding(kind, text, there) for text in texts]

    def of_kind(self, kind: Kind) -> Sequence[ForeignFinding]:
        """Return the findings of one kind."""
        return [each for each in self.findings if each.kind == kind]

    @property
    def trained(self) -> frozenset[str]:
        """Parameters with optimizer state."""
        return frozenset(self.states)


def in_a_row(parts: Sequence[TensorPiece], dim: int = 0) -> tuple[TensorPiece, ...]:
    """Return pieces one behind another along a dimension, whatever their offsets were."""
    placed, start = [], 0
    for part in parts:
        offsets = tuple(start if axis == dim else 0 for axis in range(len(part.sizes)))
        placed.append(replace(part, offsets=offsets))
        start += part.sizes[dim] if part.sizes else 0
    return tuple(placed)
