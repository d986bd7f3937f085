"""Rows that wait, and the texts that they begin with: a prompt, or what a paused row has read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.models.layers.document_attention import Documents
from holdfast.rollout.engine import Request
from holdfast.rollout.local.blocks import PADDING, SCRATCH, keys_of
from holdfast.rollout.local.cache import BLOCK_SIZE, BlockCache, StateKey, View
from holdfast.rollout.local.predictor import Predictor, RowState
from holdfast.rollout.local.replica import merged_inputs

_PLACES_OF_A_PASS, _TOKENS_OF_A_PASS = 2**17, 2**13
"""Keys that are looked at and tokens that are computed in one pass of several texts' pieces, at most."""


@dataclass
class DecodedRow:
    """The state of one completion."""

    request: Request
    place: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    number: int = 0
    """How many rows have begun, itself included, when it did."""


@dataclass(eq=False)
class Waiting:
    """Rows of one request that have not begun, or one that has been paused."""

    request: Request
    rows: deque[DecodedRow]
    blocks: list[int] = field(default_factory=list)
    """Those of the text that the rows begin with, once some of that has been computed."""
    read: int = 0
    """Tokens of the text that have been computed: pieces of a long one, or what an earlier text began with too."""
    hidden: Tensor | None = None
    """[H], what predicts the token behind that text; None until it has been computed"""
    layers: dict[StateKey, Tensor] = field(default_factory=dict)
    """[1, ...] states that recurrent layers have behind that text"""

    @classmethod
    def of(cls, request: Request) -> Waiting:
        """Return all rows of a request."""
        return cls(request, deque(DecodedRow(request, place) for place in range(len(request.seeds))))

    @property
    def computed(self) -> Tensor:
        """Return what predicts the token behind the text."""
        assert self.hidden is not None
        return self.hidden

    @property
    def text(self) -> NDArray[np.int64]:
        """[P] tokens that the rows begin with."""
        return np.concatenate([self.request.prompt, np.asarray(self.rows[0].tokens, np.int64)])

    @property
    def length(self) -> int:
        """Number of tokens that the rows begin with."""
        return len(self.request.prompt) + len(self.rows[0].tokens)

    @cached_property
    def keys(self) -> list[bytes]:
        """Keys of the full blocks that the text may share with others: not of its last token, nor beside images."""
        if self.request.model_inputs or self.request.positions is not None:
            return []
        return keys_of(self.text[:-1], BLOCK_SIZE)

    @property
    def positions(self) -> NDArray[np.int64]:
        """[A, P] positions of these tokens."""
        if self.request.positions is None:
            return np.arange(self.length)[None]
        placed = self.request.positions
        drawn = placed.max() + 1 + np.arange(len(self.rows[0].tokens))
        return np.concatenate([placed, np.broadcast_to(drawn, (len(placed), len(drawn)))], 1)

    @property
    def ahead(self) -> int:
        """How far positions run ahead of places behind the text: an image's positions are not its tokens'."""
        return int(self.positions.max()) + 1 - self.length


def compute_pieces(predictor: Predictor, cache: BlockCache, several: Sequence[Waiting], count: int) -> None:
    """Compute the next tokens of texts that have blocks, `count` of each at most, in as few passes as memory allows.

    A text's last piece tells what predicts the token behind it.

    Args:
        predictor: What runs them.
        cache: Memory of blocks.
        several: Texts without images.
        count: Tokens.
    """
    together: list[Waiting] = []
    for waiting in several:
        rows = [*together, waiting]
        longest, widest = max(text.length for text in rows), max(min(count, text.length - text.read) for text in rows)
        if together and (len(rows) * longest > _PLACES_OF_A_PASS or len(rows) * widest > _TOKENS_OF_A_PASS):
            _compute_side_by_side(predictor, cache, together, count)
            rows = [waiting]
        together = rows
    if together:
        _compute_side_by_side(predictor, cache, together, count)


def _compute_side_by_side(predictor: Predictor, cache: BlockCache, several: Sequence[Waiting], count: int) -> None:
    """Compute a piece of each text, a row each; rows with fewer tokens are filled by ones that nobody reads."""
    device, starts = predictor.device, [waiting.read for waiting in several]
    ends = [min(waiting.read + count, waiting.length) for waiting in several]
    width = max(end - start for start, end in zip(starts, ends, strict=True))
    places = [np.minimum(np.arange(start, start + width), end - 1) for start, end in zip(starts, ends, strict=True)]
    tables = np.full((len(several), max(len(waiting.blocks) for waiting in several)), PADDING, np.int64)
    written = np.empty((len(several), width), np.int64)
    for row, (waiting, start, end) in enumerate(zip(several, starts, ends, strict=True)):
        tables[row, : len(waiting.blocks)] = waiting.blocks
        written[row] = SCRATCH * BLOCK_SIZE + np.arange(width) % BLOCK_SIZE
        written[row, : end - start] = _places(waiting)[start:end]
    axes = max(len(waiting.positions) for waiting in several)
    positions = np.stack(
        [
            np.broadcast_to(waiting.positions[:, some], (axes, width))
            for waiting, some in zip(several, places, strict=True)
        ],
        axis=1,
    )
    tokens = np.stack([waiting.text[some] for waiting, some in zip(several, places, strict=True)])
    on_device = [torch.from_numpy(some).to(device) for some in (tables, np.stack(places), written, tokens, positions)]
    cache.view = View(on_device[0], on_device[1], max(ends), on_device[2].flatten())
    output = predictor.run(
        cache,
        input_ids=predictor.replica.family.with_one_image_token(on_device[3]),
        position_ids=on_device[4][0] if axes == 1 else on_device[4],
        rows=cache,
    )
    for row, (waiting, start, end) in enumerate(zip(several, starts, ends, strict=True)):
        waiting.read = end
        if end == waiting.length:
            waiting.hidden = output.last_hidden_state[row, end - start - 1]


def compute_texts(predictor: Predictor, cache: BlockCache, several: Sequence[Waiting]) -> None:
    """Compute the texts that rows begin with, and write their keys and values to their blocks.

    They lie side by side, but for those of models with recurrent layers, which would carry a state from one to another.
    """
    for together in [[waiting] for waiting in several] if predictor.replica.family.recurrent else [several]:
        _compute_together(predictor, cache, together)


def _compute_together(predictor: Predictor, cache: BlockCache, several: Sequence[Waiting]) -> None:
    """Compute texts side by side in one pass."""
    cache.states = {}
    device, lengths = predictor.device, [waiting.length for waiting in several]
    positions = _side_by_side([waiting.positions for waiting in several]).to(device)
    written = np.concatenate([_places(waiting) for waiting in several])
    cache.view = View(None, positions[0], max(lengths), torch.from_numpy(written).to(device))
    tokens = torch.from_numpy(np.concatenate([waiting.text for waiting in several])).to(device)[None]
    output = predictor.run(
        cache,
        input_ids=predictor.replica.family.with_one_image_token(tokens),
        position_ids=positions[0] if len(positions) == 1 else positions,
        **merged_inputs([waiting.request for waiting in several], device),
        documents=Documents.of(tuple(lengths), device),
    )
    ends = np.cumsum(lengths)
    last = output.last_hidden_state[0][torch.from_numpy(ends).to(device) - 1]
    for waiting, hidden in zip(several, last, strict=True):
        waiting.hidden, waiting.layers = hidden, cache.states


def state_blocks(predictor: Predictor) -> int:
    """Return the blocks that take as much memory as the states of recurrent layers do in one row, from one token."""
    cache, text = BlockCache(), Waiting.of(Request(0, np.zeros(1, np.int64), (0,)))
    cache.grow(1)
    text.blocks = [0]
    compute_texts(predictor, cache, [text])
    block = sum(tensor.nbytes for pair in cache.pairs.values() for tensor in pair)
    return -(-sum(state.nbytes for state in text.layers.values()) // block) if block else 0


def _side_by_side(several: Sequence[NDArray[np.int64]]) -> Tensor:
    """[A, P] positions of texts -> [A, 1, T] of all of them; of several axes where any has several"""
    axes = max(map(len, several))
    wide = [np.broadcast_to(positions, (axes, positions.shape[1])) for positions in several]
    return torch.from_numpy(np.concatenate(wide, axis=1))[:, None]


def _places(waiting: Waiting) -> NDArray[np.int64]:
    """Return [P], where the tokens of a text lie in memory."""
    tokens = np.arange(waiting.length)
    return np.asarray(waiting.blocks, np.int64)[tokens // BLOCK_SIZE] * BLOCK_SIZE + tokens % BLOCK_SIZE


def state_of(
    predictor: Predictor, rows: Sequence[DecodedRow], ahead: Sequence[int], texts: Sequence[Waiting]
) -> RowState:
    """Return the state of rows whose next token is drawn from what their text predicts.

    Args:
        predictor: What draws.
        rows: The rows.
        ahead: Of each, how far positions run ahead of places.
        texts: What each of them begins with.
    """
    device, layers = predictor.device, [waiting.layers for waiting in texts]
    return RowState(
        last=torch.zeros(len(rows), dtype=torch.int64, device=device),
        drawn=torch.tensor([len(row.tokens) for row in rows]).to(device),
        seeds=torch.tensor([row.request.seeds[row.place] for row in rows]).to(device),
        ahead=torch.tensor(ahead).to(device),
        seen=_tokens_in(predictor, rows),
        layers={key: torch.cat([states[key] for states in layers]) for key in layers[0]},
    )


def _tokens_in(predictor: Predictor, rows: Sequence[DecodedRow]) -> Tensor | None:
    """Return [rows, V], which tokens stand in each row; None where no option asks for it."""
    if predictor.sampling.repetition_penalty == 1.0:
        return None
    vocabulary, device = predictor.head.weight.shape[0], predictor.device
    is_present = torch.zeros(len(rows), vocabulary, dtype=torch.bool, device=device)
    for number, row in enumerate(rows):
        text = np.concatenate([row.request.prompt, np.asarray(row.tokens, np.int64)])
        is_present[number, torch.from_numpy(text).to(device)] = True
    return is_present
