"""Long texts are computed in pieces between decoding steps, where a model gives the same in pieces as at once.

A model may keep something between passes that the cache does not have. A text that is made up shows that before an
engine samples, and all texts of such a model are computed at once.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from holdfast.rollout.engine import Request
from holdfast.rollout.local.cache import BLOCK_SIZE, BlockCache
from holdfast.rollout.local.predictor import Predictor
from holdfast.rollout.local.texts import Waiting, compute_pieces, compute_texts
from holdfast.types import host_value

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Dtype -> how far what predicts the next token may lie apart, relative to its largest number."""
_TOLERANCE_OF_16_BITS = 5e-2
_MORE_TOKENS = 3 * BLOCK_SIZE + 5
"""By which the text that is made up is longer than a piece; it ends within a block."""


class Pieces:
    """Says which texts are computed in pieces.

    Args:
        size: Tokens of a piece; longer texts have several.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def cut(self, waiting: Waiting, known: int) -> bool:
        """Whether a text that has not been computed is to be in pieces; those with images never are.

        Args:
            waiting: The text.
            known: Tokens of it that need not be computed.
        """
        is_long = bool(waiting.blocks) or waiting.length - known > self.size  # one that has blocks has begun
        return waiting.hidden is None and is_long and not waiting.request.model_inputs

    def advance(self, predictor: Predictor, cache: BlockCache, waiting: Waiting) -> None:
        """Compute the next piece of a text that has blocks."""
        compute_pieces(predictor, cache, [waiting], self.size)


def why_whole(predictor: Predictor, size: int, marks: Collection[int]) -> str:
    """Compute a text of drawn tokens at once and in pieces, in memory of its own; say how they differ, "" if not.

    Args:
        predictor: What runs both; its weights are those that matter.
        size: Tokens of a piece.
        marks: Tokens that stand for images, which are not drawn.
    """
    vocabulary = predictor.replica.model.config.get_text_config().vocab_size
    drawn = np.random.default_rng(0).integers(0, vocabulary, min(size + _MORE_TOKENS, predictor.positions))
    plain = next(token for token in range(vocabulary) if token not in marks)
    tokens = np.where(np.isin(drawn, list(marks)), plain, drawn)
    text, cache, count = Waiting.of(Request(0, tokens, (0,))), BlockCache(), -(-len(tokens) // BLOCK_SIZE)
    cache.grow(count)
    text.blocks = list(range(count))
    try:
        compute_texts(predictor, cache, [text])
        whole = text.computed
        while text.read < text.length:
            compute_pieces(predictor, cache, [text], size)
        gap = float(host_value((text.computed - whole).abs().max() / whole.abs().max(), "prompts in pieces"))
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if gap <= _TOLERANCES.get(whole.dtype, _TOLERANCE_OF_16_BITS):
        return ""
    return f"what predicts the next token is {gap:.1e} of its largest number away"
