"""Long texts are computed in pieces between decoding steps, where a model gives the same in pieces as at once.

The first long text of an engine is computed both ways. A model that keeps something between passes which the cache does
not have would be found out there, and its texts are computed at once from then on.
"""

from __future__ import annotations

import torch

from holdfast.rollout.local.cache import BlockCache
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

    def cut(self, waiting: Waiting) -> bool:
        """Whether a text that has not been computed is to be in pieces; those with images never are."""
        is_long = waiting.hidden is None and waiting.length > self.size
        return is_long and self._agree is not False and not waiting.request.model_inputs

    def advance(self, predictor: Predictor, cache: BlockCache, waiting: Waiting) -> None:
        """Compute the next piece of a text that has blocks; of the first text, all of it, and compare."""
        if self._agree is None:
            self._compare(predictor, cache, waiting)
        else:
            compute_piece(predictor, cache, waiting, self.size)

    def _compare(self, predictor: Predictor, cache: BlockCache, waiting: Waiting) -> None:
        compute_texts(predictor, cache, [waiting])
        whole = waiting.computed
        try:
            while waiting.read < waiting.length:
                compute_piece(predictor, cache, waiting, self.size)
            gap = float(host_value((waiting.computed - whole).abs().max() / whole.abs().max(), "prompts in pieces"))
            reason = f"what predicts the next token is {gap:.1e} of its largest number away"
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            gap, reason = float("inf"), f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        self._agree = gap <= _TOLERANCES.get(whole.dtype, _TOLERANCE_OF_16_BITS)
        if not self._agree:
            print(
                f"rollouts compute long prompts at once, since in pieces they give something else: {reason}", flush=True
            )
            compute_texts(predictor, cache, [waiting])
