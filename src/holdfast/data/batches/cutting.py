"""Cut the stream of documents into windows of equal length; what is left over starts the next update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.data.batches.candidates import Candidates, Known
from holdfast.data.batches.ranks import Ranks
from holdfast.types import Example


@dataclass(frozen=True)
class Rest:
    """The first token that no window has used."""

    draw: int
    offset: int
    """Tokens of that row used already."""


@dataclass(frozen=True)
class Piece:
    """Tokens start..end-1 of one document; it never crosses a window's edge."""

    document: Known
    start: int
    end: int

    def of(self, example: Example) -> Example:
        """Return the piece as a sequence of its own; nothing predicts its first token any more."""
        loss_mask = example.loss_mask[self.start : self.end].copy()
        loss_mask[:1] = False
        per_token = {name: values[self.start : self.end] for name, values in example.per_token.items()}
        return replace(example, tokens=example.tokens[self.start : self.end], loss_mask=loss_mask, per_token=per_token)


def pieces_of(documents: Sequence[Known], *, offset: int, goal: int, window: int) -> tuple[list[Piece], Rest | None]:
    """Cut documents into pieces that fill windows exactly.

    Args:
        documents: In draw order; those of one row follow each other.
        offset: Tokens of the first row used before.
        goal: Tokens to hand out; fewer when the documents end.
        window: Tokens of one window.

    Returns:
        The pieces, and where the unused rest begins (None if nothing is left).
    """
    pieces: list[Piece] = []
    used, row, before = 0, -1, 0  # `before`: tokens of this row in earlier documents
    for document in documents:
        if document.draw != row:
            row, before = document.draw, 0
        used_before = offset if row == documents[0].draw else 0
        start = min(max(used_before - before, 0), document.tokens)
        while start < document.tokens:
            if used == goal:
                return pieces, Rest(row, before + start)
            end = min(document.tokens, start + window - used % window)
            pieces.append(Piece(document, start, end))
            used += end - start
            start = end
        before += document.tokens
    return pieces, None


def cut_windows(
    candidates: Candidates[Example], ranks: Ranks, *, offset: int, goal: int, window: int
) -> tuple[Candidates[Example], Rest | None]:
    """Replace documents by the pieces of their windows; arguments as in `pieces_of`."""
    pieces, rest = pieces_of(candidates.sequences, offset=offset, goal=goal, window=window)
    own: dict[tuple[int, int], Example] = {}
    for number, piece in enumerate(pieces):
        if piece.document.owner == ranks.rank:
            own[(piece.document.draw, number)] = piece.of(
                candidates.own_sequences[(piece.document.draw, piece.document.part)]
            )
    trained: dict[tuple[int, int], int] = {}
    for theirs in ranks.gather({key: example.trained_tokens for key, example in own.items()}):
        trained |= theirs
    sequences = [
        Known(piece.document.draw, number, piece.end - piece.start, trained[(piece.document.draw, number)],
              piece.document.owner)
        for number, piece in enumerate(pieces)
    ]  # fmt: skip
    return replace(candidates, own_sequences=own, sequences=sequences, counted=_begun(candidates, offset, rest)), rest


def _begun(candidates: Candidates[Example], offset: int, rest: Rest | None) -> list[tuple[int, Mapping[str, int]]]:
    """Return what was counted on rows whose first token is used here: rows read ahead or cut are counted once."""
    first = candidates.sequences[0].draw if candidates.sequences and offset > 0 else -1
    return [
        (draw, counts)
        for draw, counts in candidates.counted
        if draw != first and (rest is None or (draw, 0) < (rest.draw, rest.offset))
    ]
