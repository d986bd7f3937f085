"""What the host knows of rows that are decoded together: whose they are, what they said, which of them have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.models.layers.attention import Documents
from holdfast.rollout.cache import PromptCache, RowCache
from holdfast.rollout.eager import DeviceRows, EagerRows
from holdfast.rollout.engine import Request
from holdfast.rollout.predictor import Predictor, RowState
from holdfast.rollout.replica import merged_inputs
from holdfast.rollout.stopping import Stops
from holdfast.types import Finish


@dataclass
class DecodedRow:
    """One completion while it grows."""

    request: Request
    place: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_choices: NDArray[np.int16] | None = None
    """[P, layers, k] experts that the prompt met; None where nobody asks"""
    choices: list[NDArray[np.int16]] = field(default_factory=list)
    """[layers, k] of each drawn token that was read"""


class Decoding:
    """Rows that are decoded together.

    Args:
        rows: Whose they are.
        on_device: The same rows, as the device has them.
        limit: Most tokens of a completion.
    """

    def __init__(self, rows: list[DecodedRow], on_device: DeviceRows, limit: int) -> None:
        self.rows, self.on_device = rows, on_device
        self._limit = limit
        self._done: set[int] = set()

    @property
    def left(self) -> list[int]:
        """Places of the rows that have not ended."""
        return [number for number in range(len(self.rows)) if number not in self._done]

    @property
    def missing(self) -> int:
        """Tokens until the first row that has not ended is as long as a completion may be."""
        return self._limit - max(len(self.rows[number].tokens) for number in self.left)

    def take(self, stops: Stops, *, abort: bool) -> list[tuple[DecodedRow, Finish]]:
        """Bring the drawn tokens to the host, and return the rows that have ended."""
        drawn = self.on_device.look()
        ended = []
        for number, row in enumerate(self.rows):
            if number in self._done:
                continue
            if drawn.choices is not None:
                row.choices += list(drawn.choices[number])
            before = len(row.tokens)
            row.tokens += drawn.tokens[number]
            row.logprobs += drawn.logprobs[number]
            end = stops.end(row.tokens, before)
            if end is not None and end <= self._limit:
                finish = Finish.STOP
            elif len(row.tokens) >= self._limit:
                end, finish = self._limit, Finish.LENGTH
            elif abort:
                end, finish = len(row.tokens), Finish.ABORT
            else:
                continue
            del row.tokens[end:], row.logprobs[end:]
            self._done.add(number)
            ended.append((row, finish))
        return ended

    def remaining(self) -> Decoding | None:
        """Drop ended rows when they are half of all; None if nothing is left."""
        left = self.left
        if 2 * len(left) <= len(self.rows):
            self.drop_ended()
        return self if left else None

    def drop_ended(self) -> None:
        """Keep the rows that have not ended, if any has."""
        left = self.left
        if self._done and left:
            self.on_device.keep(left)
            self.rows = [self.rows[number] for number in left]
            self._done = set()

    def join(self, rows: Sequence[DecodedRow], on_device: EagerRows) -> None:
        """Take further rows in: rows of different ages need not know of each other."""
        self.drop_ended()
        self.on_device.add(on_device)
        self.rows += rows


def begun(predictor: Predictor, requests: Sequence[Request]) -> tuple[list[DecodedRow], EagerRows]:
    """Compute prompts, each once for all of its completions, and draw the first tokens."""
    device = predictor.device
    rows = [DecodedRow(request, place) for request in requests for place in range(len(request.seeds))]
    of_row = [number for number, request in enumerate(requests) for _ in request.seeds]
    placed = [_positions_of(request) for request in requests]
    ahead = [int(positions.max()) + 1 - positions.shape[1] for positions in placed]
    cache, hidden = _compute_prompts(predictor, requests, placed, rows, of_row)
    none = torch.zeros(len(rows), dtype=torch.int64, device=device)
    state = RowState(
        last=none.clone(),
        drawn=none,
        seeds=torch.tensor([seed for request in requests for seed in request.seeds]).to(device),
        ahead=torch.tensor([ahead[number] for number in of_row]).to(device),
        seen=_tokens_of_prompts(predictor, rows),
    )
    on_device = EagerRows(predictor, state, cache)
    on_device.begin(hidden)
    return rows, on_device


def _compute_prompts(
    predictor: Predictor,
    requests: Sequence[Request],
    placed: Sequence[NDArray[np.int64]],
    rows: Sequence[DecodedRow],
    of_row: Sequence[int],
) -> tuple[RowCache, Tensor]:
    """Run all prompts side by side; return the rows' cache, and [rows, H] what predicts each row's next token.

    Args:
        predictor: What runs them.
        requests: Whose prompts.
        placed: [A, P] positions of each prompt's tokens.
        rows: The completions; the experts that their prompts met are noted there.
        of_row: Which request's each of them is.
    """
    device = predictor.device
    tokens = torch.from_numpy(np.concatenate([request.prompt for request in requests])).to(device)[None]
    lengths = [positions.shape[1] for positions in placed]
    axes = max(len(positions) for positions in placed)
    wide = [np.broadcast_to(positions, (axes, positions.shape[1])) for positions in placed]
    positions = torch.from_numpy(np.concatenate(wide, axis=1)).to(device)[:, None]  # [A, 1, T]
    cache = PromptCache()
    output, met = predictor.run(
        input_ids=predictor.replica.family.with_one_image_token(tokens),
        position_ids=positions[0] if axes == 1 else positions,
        past_key_values=cache,
        **merged_inputs(requests, device),
        documents=Documents.of(tuple(lengths), device),
    )
    ends = np.cumsum(lengths).tolist()
    spans = [(ends[number] - lengths[number], ends[number]) for number in of_row]
    if met is not None:
        of_prompts = met.cpu().numpy()
        for row, (start, end) in zip(rows, spans, strict=True):
            row.prompt_choices = of_prompts[start:end]
    last = torch.tensor([end - 1 for _, end in spans]).to(device)
    return RowCache.of(cache, spans), output.last_hidden_state[0][last]


def _tokens_of_prompts(predictor: Predictor, rows: Sequence[DecodedRow]) -> Tensor | None:
    """Return [rows, V], which tokens stand in each row; None where no option asks for it."""
    if predictor.sampling.repetition_penalty == 1.0:
        return None
    vocabulary, device = predictor.head.weight.shape[0], predictor.device
    seen = torch.zeros(len(rows), vocabulary, dtype=torch.bool, device=device)
    for number, row in enumerate(rows):
        seen[number, torch.from_numpy(row.request.prompt).to(device)] = True
    return seen


def _positions_of(request: Request) -> NDArray[np.int64]:
    """Return [A, P] positions of a prompt's tokens."""
    return np.arange(len(request.prompt))[None] if request.positions is None else request.positions
