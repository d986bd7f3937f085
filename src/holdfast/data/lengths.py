"""What happens to a sequence longer than `data.max_length`. Every case is counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from holdfast.config.data import TextConfig
from holdfast.errors import DataError


@dataclass(frozen=True)
class Stretch:
    """Tokens, and which of them are trained; nothing predicts the first one, so it is not."""

    tokens: list[int]
    trained: list[bool]

    @property
    def trains_nothing(self) -> bool:
        """Whether no token is left for the loss."""
        return not any(self.trained[1:])


def fit(stretch: Stretch, text: TextConfig, row_name: str, counts: Counter[str]) -> list[Stretch]:
    """Bring a sequence to at most `text.max_length` tokens, and leave out what trains nothing.

    Counts `truncated`, `split` and `overlong_dropped` sequences, and the `untrained` ones left out.

    Raises:
        DataError: It is longer and `text.overlong` is `refuse`.
    """
    limit, length = text.max_length, len(stretch.tokens)
    pieces = [stretch]
    if length > limit:
        match text.overlong:
            case "truncate":
                counts["truncated"] += 1
                pieces = [_piece(stretch, 0, limit)]
            case "split":
                counts["split"] += 1
                pieces = [_piece(stretch, start, start + limit) for start in range(0, length, limit)]
            case "drop":
                counts["overlong_dropped"] += 1
                return []
            case "refuse":
                raise DataError(
                    f"{row_name} has {length} tokens, more than data.max_length={limit}. Raise data.max_length to "
                    f"{length}, or set data.overlong to truncate, split or drop."
                )
    kept = [piece for piece in pieces if not piece.trains_nothing]
    if len(kept) < len(pieces):
        counts["untrained"] += len(pieces) - len(kept)
    return kept


def _piece(stretch: Stretch, start: int, end: int) -> Stretch:
    return Stretch(stretch.tokens[start:end], stretch.trained[start:end])
