"""Cut sequences that are longer than `data.max_length` (`data.overlong`), and say what tokenisation did to rows.

Every case is counted, under a name of `Tokenised.counts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.config.sections.data import TextConfig
from holdfast.errors import DataError
from holdfast.types import Example

DROPPED_ROLES = {
    "system": "a system message",
    "user": "a user's message",
    "developer": "a developer's message",
    "tool": "a tool's result",
    "role": "a message of another role",
}
"""Roles whose messages a chat template may leave out; such messages are counted as `ROLE_dropped`."""

TEMPLATE = {
    "no_end_of_turn": "answers that the chat template does not close, so that a model does not learn to stop",
    **{
        f"{role}_dropped": f"rows with {description} that the chat template leaves out"
        for role, description in DROPPED_ROLES.items()
    },
}
"""What a chat template does that nobody expects of it."""

_LOST = {
    "overlong_dropped": "left out as longer than data.max_length={limit} has room for",
    "untrained": "without a trained token within data.max_length={limit}",
    "bad_rows": "that cannot be read",
}


class Grid(NamedTuple):
    """Consecutive feature tokens of an image or of frames, arranged by frame, row and column."""

    offset: int
    """Offset of its first token from the beginning of its image or video."""
    frames: int
    rows: int
    columns: int
    interval: float
    """Positions from one frame to the next."""


@dataclass(frozen=True)
class ImageSpan:
    """The tokens of one image or video and its model inputs; it is kept completely or dropped."""

    start: int
    end: int
    inputs: Mapping[str, NDArray[Any]]
    grids: tuple[Grid, ...] = ()
    """Grids of a video; the grid of an image follows from its inputs."""


@dataclass(frozen=True)
class Stretch:
    """A token sequence with its loss mask; the first token is never trained, since nothing predicts it."""

    tokens: list[int]
    trained: list[bool]
    images: tuple[ImageSpan, ...] = ()

    @property
    def trains_nothing(self) -> bool:
        """Whether no token is left for the loss."""
        return not any(self.trained[1:])


def cut_to_length(stretch: Stretch, text: TextConfig, row_name: str, counts: Counter[str]) -> list[Stretch]:
    """Bring a sequence to at most `text.max_length` tokens, and leave out what trains nothing.

    Counts `truncated`, `split` and `overlong_dropped` sequences, and the `untrained` ones left out.

    Raises:
        DataError: The sequence is longer and `text.overlong` is `refuse`.
    """
    limit, length = text.max_length, len(stretch.tokens)
    pieces = [stretch]
    if length > limit:
        match text.overlong:
            case "truncate":
                counts["truncated"] += 1
                pieces = [cut_to(stretch, limit)]
            case "split":
                counts["split"] += 1
                pieces = _split(stretch, limit, row_name)
            case "drop":
                counts["overlong_dropped"] += 1
                return []
            case "refuse":
                raise DataError(
                    f"{row_name} has {length} tokens, more than data.max_length={limit}. Raise data.max_length to "
                    f"{length}, or set data.overlong to truncate, split or drop."
                )
    trained_pieces = [piece for piece in pieces if not piece.trains_nothing]
    if len(trained_pieces) < len(pieces):
        counts["untrained"] += len(pieces) - len(trained_pieces)
    return trained_pieces


def cut_to(stretch: Stretch, limit: int) -> Stretch:
    """Return the first tokens of a sequence, at most `limit`; an image stays whole or is left out."""
    return _piece(stretch, 0, _whole_images(stretch, limit))


def _split(stretch: Stretch, limit: int, row_name: str) -> list[Stretch]:
    pieces = []
    start = 0
    while start < len(stretch.tokens):
        end = _whole_images(stretch, start + limit)
        if end <= start:
            (longest,) = [span for span in stretch.images if span.start == start]
            raise DataError(
                f"{row_name} has {'a video' if longest.grids else 'an image'} of {longest.end - longest.start} tokens, "
                f"more than data.max_length={limit}, and that cannot be split. Raise data.max_length, or lower "
                "data.max_pixels."
            )
        pieces.append(_piece(stretch, start, end))
        start = end
    return pieces


def _whole_images(stretch: Stretch, end: int) -> int:
    """Return the last place up to `end` that is not inside an image."""
    cut = next((span.start for span in stretch.images if span.start < end < span.end), end)
    return min(cut, len(stretch.tokens))


def _piece(stretch: Stretch, start: int, end: int) -> Stretch:
    images = tuple(
        replace(span, start=span.start - start, end=span.end - start)
        for span in stretch.images
        if start <= span.start and span.end <= end
    )
    return Stretch(stretch.tokens[start:end], stretch.trained[start:end], images)


def example_of(stretch: Stretch, sample_id: int, source: str, positions: NDArray[np.int64] | None = None) -> Example:
    """Return a sequence that is a prompt of its own."""
    loss_mask = np.asarray(stretch.trained, dtype=np.bool_)
    loss_mask[0] = False
    tokens = np.asarray(stretch.tokens, dtype=np.int64)
    inputs = joined_inputs(stretch)
    return Example(sample_id, sample_id, tokens, loss_mask, source, model_inputs=inputs, positions=positions)


def joined_inputs(stretch: Stretch) -> dict[str, NDArray[Any]]:
    """Return what the model gets of all images of a sequence."""
    spans = [span.inputs for span in stretch.images]
    if len(spans) == 1:
        return dict(spans[0])  # pixels are large, and a copy takes a tenth as long as to make them
    return {name: np.concatenate([span[name] for span in spans]) for name in (spans[0] if spans else ())}


def unexpected(counts: Mapping[str, float]) -> list[str]:
    """Return what a chat template does to rows and nobody expects, a sentence for each."""
    return [f"{counts[name]:.0f} {sentence}" for name, sentence in TEMPLATE.items() if counts.get(name)]


def lost_rows(counts: Mapping[str, int], limit: int) -> str:
    """Return how many rows are not trained on, and why; "" where none was lost."""
    return ", ".join(
        f"{counts[name]} {reason.format(limit=limit)}" for name, reason in _LOST.items() if counts.get(name)
    )
