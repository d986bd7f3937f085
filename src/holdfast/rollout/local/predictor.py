"""One token more in every row: a forward pass over the last tokens, and a draw from what it predicts.

A step changes what it knows of the rows in place and waits for nothing, so that it can be recorded; see `graphs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.models.chunks.logits import HeadWeights, logits_of
from holdfast.models.layers.attention import cache_argument
from holdfast.models.layers.family import HeadSpec, backbone_of
from holdfast.models.layers.rotary import rotary_boundaries
from holdfast.rollout.local.cache import BlockCache, StateKey
from holdfast.rollout.local.replica import Replica
from holdfast.rollout.sampling import draw, most_probable, penalise, restrict, uniform


@dataclass
class RowState:
    """What the next token of each row follows from, beside the model, its keys and its values."""

    last: Tensor
    """[rows] int64, tokens drawn last, whose successors are not predicted yet"""
    drawn: Tensor
    """[rows] int64, tokens each row has drawn"""
    seeds: Tensor
    """[rows] int64"""
    ahead: Tensor
    """[rows] int64, how far each row's positions run ahead of its places: an image's positions are not its tokens'"""
    seen: Tensor | None
    """[rows, V] bool, which tokens stand in each row; None where no option asks for it"""
    layers: dict[StateKey, Tensor] = field(default_factory=dict)
    """[rows, ...] states of recurrent layers"""

    def tensors(self) -> Iterator[Tensor]:
        """Yield all of them, always in the same order."""
        several = (self.last, self.drawn, self.seeds, self.ahead, self.seen, *self.layers.values())
        return (tensor for tensor in several if tensor is not None)

    def of(self, rows: Tensor | slice) -> RowState:
        """Return some rows: a copy for indices, [n] int64, the same memory for a slice."""
        return self._from([tensor[rows] for tensor in self.tensors()])

    def empty(self, rows: int) -> RowState:
        """Return as many rows of zeros, of the same kind."""
        return self._from([tensor.new_zeros(rows, *tensor.shape[1:]) for tensor in self.tensors()])

    def _from(self, tensors: list[Tensor]) -> RowState:
        last, drawn, seeds, ahead, *others = tensors
        seen = None if self.seen is None else others.pop(0)
        return RowState(last, drawn, seeds, ahead, seen, dict(zip(self.layers, others, strict=True)))


class Predictor:
    """The model, and how tokens are drawn from what it predicts.

    Args:
        replica: The model.
        head: The output layer.
        spec: How logits follow from hidden states.
        sampling: The distribution of a draw.
    """

    def __init__(self, replica: Replica, head: HeadWeights, spec: HeadSpec, sampling: SamplingConfig) -> None:
        self.replica, self.head, self.sampling = replica, head, sampling
        self._spec = spec
        self._watched: list[Tensor] | None = None
        config = replica.model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", 2**31)
        self.positions = min(positions, *rotary_boundaries(config), 2**31)
        """Tokens of a text beyond which the model has no positions, or other rotary angles."""

    @property
    def distribution(self) -> tuple[float | None, ...]:
        """What a draw follows from beside the model."""
        how = self.sampling
        return how.temperature, how.top_k, how.top_p, how.min_p, how.repetition_penalty

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.replica.device

    def run(self, cache: BlockCache, **inputs: Any) -> Any:
        """Run the backbone; return its output."""
        backbone = backbone_of(self.replica.model)
        return backbone(use_cache=True, **cache_argument(backbone, cache), **inputs)

    def step(self, state: RowState, cache: BlockCache, *, has_fillers: bool = False) -> tuple[Tensor, Tensor]:
        """Read every row's last token and draw the next one.

        Args:
            state: The rows.
            cache: Their keys and values; its view says where each row's token is written.
            has_fillers: Some rows only fill a bucket and go on for ever: their positions may lie beyond the model's.

        Returns:
            What `draw` does.
        """
        positions, cache.states = cache.view.positions + state.ahead[:, None], state.layers
        output = self.run(
            cache,
            input_ids=state.last[:, None],
            position_ids=positions.clamp(max=self.positions - 1) if has_fillers else positions,
            rows=cache,
        )
        hidden = output.last_hidden_state[:, 0]
        if self._watched is not None:
            self._watched.append(hidden)
        return self.draw(hidden, state)

    @contextmanager
    def watched(self) -> Iterator[list[Tensor]]:
        """Give a list of what predicted the tokens, [rows, H] of each step within the block."""
        self._watched = []
        try:
            yield self._watched
        finally:
            self._watched = None

    def logprobs(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, float]:
        """Return what tokens, [rows], have for log-probabilities at temperature 1, and the spread of a row's logits.

        Args:
            hidden: [rows, H], what predicts them.
            tokens: Any.
        """
        logits, _ = logits_of(hidden.to(self.head.weight.dtype), self.head, self._spec)
        logprobs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        return logprobs, float(logits.double().std(-1).mean())

    def draw(self, hidden: Tensor, state: RowState) -> tuple[Tensor, Tensor]:
        """Draw a token in every row, and return tokens [rows] and their log-probabilities [rows].

        Args:
            hidden: [rows, H], what predicts them.
            state: The rows; the tokens are noted there.
        """
        sampling = self.sampling
        logits, _ = logits_of(hidden.to(self.head.weight.dtype), self.head, self._spec)
        if state.seen is not None:
            logits = penalise(logits, state.seen, sampling.repetition_penalty)
        if sampling.temperature == 0.0:
            tokens, logprobs = most_probable(logits)
        else:
            if sampling.temperature != 1.0:
                logits.div_(sampling.temperature)
            logits = restrict(logits, sampling)
            tokens, logprobs = draw(logits, uniform(state.seeds, state.drawn))
        if state.seen is not None:
            state.seen.scatter_(1, tokens[:, None], value=True)
        state.last.copy_(tokens)
        state.drawn.add_(1)
        return tokens, logprobs
