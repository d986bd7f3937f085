"""Give TRL on the CPU the head it has on a GPU, so that ratios compare trainers and not a missing Triton kernel.

On CUDA, TRL 1.16 scores only trained tokens with a chunked kernel; on the CPU it falls back to many float32 passes over
every position. The patch takes its GPU branch and computes the same log-probabilities in row chunks. `python
gpu_like_head.py` compares loss and gradients with stock TRL to 1e-5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ChunkedLogprobs(torch.autograd.Function):
    """log p(target) from hidden states and head, 256 rows at a time, recomputed in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return [N] log-probabilities."""
        normalisers, chosen = [], []
        for rows, wanted in zip(hidden.split(256), targets.split(256), strict=True):
            logits = rows @ weight.t()
            normalisers.append(logits.logsumexp(-1))
            chosen.append(logits.gather(1, wanted[:, None]).squeeze(1))
        normaliser = torch.cat(normalisers) if normalisers else hidden.new_zeros(0)
        ctx.save_for_backward(hidden, weight, targets, normaliser)
        return torch.cat(chosen) - normaliser if chosen else hidden.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, by_logprob: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return gradients of hidden states and head."""
        hidden, weight, targets, normaliser = ctx.saved_tensors
        by_hidden, by_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, hidden.shape[0], 256):
            rows = slice(start, start + 256)
            slope = (hidden[rows] @ weight.t()).sub_(normaliser[rows, None]).exp_().mul_(-by_logprob[rows, None])
            slope[torch.arange(slope.shape[0]), targets[rows]] += by_logprob[rows]
            by_hidden[rows] = slope @ weight
            by_weight.addmm_(slope.t(), hidden[rows])
        return by_hidden, by_weight, None


class _Replacement:
    """Takes the place of TRL's autograd function, with its arguments and its five outputs."""

    @staticmethod
    def apply(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, *others: Any
    ) -> tuple[Tensor | None, ...]:
        softcap, scale, outputs = others[1:]
        assert bias is None and softcap is None and scale == 1.0, "the patch serves plain heads"
        logprobs = ChunkedLogprobs.apply(hidden / temperature if temperature != 1.0 else hidden, weight, targets)
        empty = torch.zeros_like(logprobs).detach()
        names = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
        return (logprobs, *(empty if name in outputs else None for name in names))


def install() -> None:
    """Patch TRL in this process."""
    import trl.trainer.utils as utils

    utils._use_triton = lambda _: True
    utils._ChunkedLogProbFunction = _Replacement
