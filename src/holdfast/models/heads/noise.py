"""Noise on the embeddings of a training step.

It is NEFTune (Jain et al. 2023, arXiv:2310.05914, algorithm 1): a document of L
tokens and width d has numbers uniform within alpha / sqrt(L d), which follow from seed, step and sample id alone, not
from how a batch is packed, split or spread. transformers takes the padded length of the batch for L, and pads.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from holdfast.errors import ModelError
from holdfast.types import Batch


class EmbeddingNoise:
    """Adds to what the input embeddings return, until it is closed.

    Args:
        embeddings: The module.
        alpha: The scale.
        seed: Of the run.
        step: Updates done before this one.
    """

    def __init__(self, embeddings: nn.Module, alpha: float, seed: int, step: int) -> None:
        self._alpha, self._seed, self._step = alpha, seed, step
        self._batch: Batch | None = None
        self._hook = embeddings.register_forward_hook(self._add)

    def follow(self, batch: Batch) -> None:
        """Let the next call be that of a batch.

        Raises:
            ModelError: The batch before it never came to the embeddings.
        """
        self._refuse_silence()
        self._batch = batch

    def close(self) -> None:
        """End it, whatever has happened."""
        self._hook.remove()

    def end(self) -> None:
        """End it after all batches.

        Raises:
            ModelError: As `follow`.
        """
        self.close()
        self._refuse_silence()

    def _refuse_silence(self) -> None:
        if self._batch is not None:
            raise ModelError(
                "The model never called its input embeddings with the tokens of a batch, so neftune_alpha would change "
                "nothing. Leave neftune_alpha out."
            )

    def _add(self, _: nn.Module, __: object, output: Tensor) -> Tensor:
        # Some models look up the one embedding of an image's token besides.
        if self._batch is None or output.shape[:-1] != self._batch.tokens.shape:
            return output
        batch, self._batch = self._batch, None
        return output + self._of(batch, output.shape[-1]).to(output.device, output.dtype)

    def _of(self, batch: Batch, width: int) -> Tensor:
        """Return [B, T, d] in float32, 0 on padding."""
        noise = torch.zeros(*batch.tokens.shape, width, device=batch.tokens.device)
        generator = torch.Generator(noise.device)
        for sample_id, (row, start, length) in zip(batch.sample_ids, _documents(batch), strict=True):
            digest = hashlib.sha256(f"neftune:{self._seed}:{self._step}:{sample_id}".encode()).digest()
            generator.manual_seed(int.from_bytes(digest[:7], "little"))
            bound = self._alpha / math.sqrt(length * width)
            noise[row, start : start + length].uniform_(-bound, bound, generator=generator)
        return noise


def _documents(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """Yield row, first position and length of each sequence; what stands behind them in a row is padding."""
    sequences = min(1, len(batch.sample_ids)) if batch.is_padded else len(batch.sample_ids)
    for row, lengths in enumerate(batch.lengths):
        start = 0
        for length in lengths[:sequences]:
            yield row, start, length
            start += length
