"""Long texts are computed in pieces between decoding steps, where a model gives the same in pieces as at once.

The first long text of an engine is computed both ways. A model that keeps something between passes which the cache does
not have would be found out there, and its texts are computed at once from then on.
"""

from __future__ import annotations

import torch

from holdfast.rollout.local.cache import BLOCK_SIZE, BlockCache
from holdfast.rollout.local.predictor import Predictor
from holdfast.rollout.local.texts import Waiting, compute_piece, compute_texts
from holdfast.types import host_value

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Dtype -> how far what predicts the next token may lie apart, relative to its largest number."""
_TOLERANCE_OF_16_BITS = 5e-2


class Pieces:
    """Says which texts are computed in pieces.

    Args:
        size: Tokens of a piece; longer texts have several.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._agree: bool | None = None
        """Whether pieces were found to give what the whole gives; None until a long text came."""

    def cut(self, predictor: Predictor, waiting: Waiting) -> bool:
        """Whether a text that has not been computed is to be in pieces; those with images never are."""
        if waiting.hidden is not None or waiting.length <= self.size or waiting.request.model_inputs:
            return False
        if self._agree is None:
            self._agree = self._agrees(predictor, waiting)
        return self._agree

    def advance(self, predictor: Predictor, cache: BlockCache, waiting: Waiting) -> None:
        """Compute the next piece of a text that has blocks."""
        compute_piece(predictor, cache, waiting, self.size)

    def _agrees(self, predictor: Predictor, waiting: Waiting) -> bool:
        """Compute a text at once and in pieces, beside what is decoded.

        Nothing of it is used: the order of sums must not follow from which text was the first that this process saw.
        """
        cache, count = BlockCache(), -(-waiting.length // BLOCK_SIZE)
        cache.grow(count)
        text = Waiting(waiting.request, waiting.rows, blocks=list(range(count)))
        compute_texts(predictor, cache, [text])
        whole = text.computed
        try:
            while text.read < text.length:
                compute_piece(predictor, cache, text, self.size)
            gap = float(host_value((text.computed - whole).abs().max() / whole.abs().max(), "prompts in pieces"))
            reason = f"what predicts the next token is {gap:.1e} of its largest number away"
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            gap, reason = float("inf"), f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if gap <= _TOLERANCES.get(whole.dtype, _TOLERANCE_OF_16_BITS):
            return True
        print(f"rollouts compute long prompts at once, since in pieces they give something else: {reason}", flush=True)
        return False
