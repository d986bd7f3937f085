"""Rows on the device as they are decoded operation by operation: exactly the rows there are, as long as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.rollout.cache import RowCache
from holdfast.rollout.predictor import Predictor, RowState


class Drawn(NamedTuple):
    """What rows have drawn since the last look, on the host."""

    tokens: list[list[int]]
    """Of each row."""
    logprobs: list[list[float]]
    choices: NDArray[np.int16] | None
    """[rows, tokens, layers, k] experts that the tokens met which were read; None where nobody asks"""


class DeviceRows(Protocol):
    """Rows being decoded, as the device has them."""

    def run(self, count: int) -> None:
        """Draw that many tokens in every row."""
        ...

    def look(self) -> Drawn:
        """Bring what was drawn to the host."""
        ...

    def keep(self, left: Sequence[int]) -> None:
        """Drop all rows but these; nothing is drawn and not yet looked at."""
        ...

    def add(self, other: EagerRows) -> None:
        """Append rows; nothing is drawn and not yet looked at."""
        ...


class EagerRows:
    """Rows whose lengths the host knows.

    Args:
        predictor: What steps.
        state: The rows.
        cache: Their keys and values.
    """

    def __init__(self, predictor: Predictor, state: RowState, cache: RowCache) -> None:
        self._predictor = predictor
        self.state, self.cache = state, cache
        self._pending: list[tuple[Tensor, Tensor]] = []
        """Tokens and log-probabilities of the steps since the last look."""
        self._unnoted: list[Tensor] = []
        """[rows, layers, k] experts that the tokens met that were read since the last look."""

    def begin(self, hidden: Tensor) -> None:
        """Draw the first tokens, which [rows, H] hidden states of the prompts predict."""
        self._pending.append(self._predictor.draw(hidden, self.state))

    def run(self, count: int) -> None:
        """Draw that many tokens in every row."""
        for _ in range(count):
            tokens, logprobs, met = self._predictor.step(self.state, self.cache)
            self._pending.append((tokens, logprobs))
            if met is not None:
                self._unnoted.append(met)

    def look(self) -> Drawn:
        """Bring what was drawn to the host."""
        tokens, logprobs = (torch.stack(several, 1).tolist() for several in zip(*self._pending, strict=True))
        met = torch.stack(self._unnoted, 1).cpu().numpy() if self._unnoted else None
        self._pending.clear()
        self._unnoted.clear()
        return Drawn(tokens, logprobs, met)

    def keep(self, left: Sequence[int]) -> None:
        """Drop all rows but these; nothing is drawn and not yet looked at."""
        rows = torch.tensor(left, device=self._predictor.device)
        self.cache.keep(rows, [self.cache.lengths[number] for number in left])
        self.state = self.state.of(rows)

    def add(self, other: EagerRows) -> None:
        """Append rows; nothing is drawn and not yet looked at."""
        self.cache.add(other.cache)
        self.state = self.state.joined(other.state)
