"""Where a stream of batches stands, as a checkpoint holds it, and how far it goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

from holdfast.config.base import SavedCount


@dataclass(frozen=True)
class Cursor:
    """The position of a stream, in global draws and independent of ranks."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    draw: SavedCount
    """The next candidate."""
    epoch: SavedCount
    epoch_first_draw: SavedCount
    batches_in_epoch: SavedCount
    sequences_in_epoch: SavedCount
    """All that its rows gave: two of a pair, and two where a row brings its prompt with another row's answer."""
    offset: SavedCount
    """Tokens of the next row that windows have used already (packing: wrapped)."""


@dataclass(frozen=True)
class StreamState:
    """The state of a stream in a checkpoint."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    cursor: Cursor
    sizes: list[SavedCount | None]
    """Number of rows of each source; None while the end of a stream is not known."""
    seen: Annotated[list[SavedCount], Field(min_length=2, max_length=2)]
    """Number of rows read, and of the tokens of all their sequences."""


@dataclass(frozen=True)
class StreamLimits:
    """How much of the data a stream serves."""

    passes: float | None = None
    """Passes over the data, the last one perhaps in part; None: without end."""
    batches: int | None = None
    """Batches per pass."""
    repeat: bool = False
    """Serve the first pass again and again."""
    draws: int | None = None
    """Candidates per pass: only the first rows."""
    by_rows: bool = False
    """Part of a pass is a part of its rows: batches have another size than was configured."""
