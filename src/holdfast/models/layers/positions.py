"""How many positions a model has: a table that ends, or angles that are computed for any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_TABLES = ("wpe.weight", "embed_positions.weight", "embed_positions", "pos_encoding")
"""Ends of the names of tensors with a row per position: GPT-2's, OPT's, GPT-J's, CTRL's."""
_OFFSET = 2
"""OPT and its kin keep so many rows in front of the first position."""


@dataclass(frozen=True)
class Positions:
    """What `max_position_embeddings` means in a model."""

    count: int
    in_a_table: bool
    """Whether there is nothing behind the last one; else angles, or a bias of distances, go on beyond."""


def positions_of(model: Any) -> Positions | None:
    """Return the positions that a model's configuration names; None where it names none."""
    count = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if count is None:
        return None
    tensors = (*model.named_parameters(), *model.named_buffers())
    rows = [tensor.shape[0] for name, tensor in tensors if name.endswith(_TABLES)]
    return Positions(count, any(count <= number <= count + _OFFSET for number in rows))
