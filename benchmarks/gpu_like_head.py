"""Give TRL on the CPU the head it has on a GPU, so that ratios compare trainers and not a missing Triton kernel.

    python benchmarks/gpu_like_head.py

compares loss and gradients with stock TRL to 1e-5. On CUDA, TRL 1.16 scores only trained tokens with a chunked kernel;
on the CPU it falls back to many float32 passes over every position. The patch takes its GPU branch and computes the
same log-probabilities in row chunks. Entropy and accuracy, which TRL only logs, are not computed but reported as 0: a
GPU kernel has them at next to no cost, so the patched TRL is, if anything, a little too fast.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

TOLERANCE = 1e-5


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


def _model(*, tied: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=5003,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return AutoModelForCausalLM.from_config(config).float()


def _batch(*, packed: bool) -> dict[str, Tensor]:
    """Return what TRL's collators make: four rows of which the third is short, or the same tokens as one row."""
    tokens = torch.randint(3, 5003, (4, 96), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, :20] = -100  # a prompt
    if packed:
        labels[:, 0] = -100
        positions = torch.arange(96).repeat(4)[None]
        return {"input_ids": tokens.view(1, -1), "labels": labels.view(1, -1), "position_ids": positions}
    mask = torch.ones_like(tokens)
    mask[2, 50:] = 0
    return {"input_ids": tokens, "labels": labels.masked_fill(mask == 0, -100), "attention_mask": mask}


def _loss_and_gradients(tied: bool, packed: bool, temperature: float) -> dict[str, Tensor]:
    from trl.trainer.utils import add_fused_lm_head

    model = _model(tied=tied)
    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy", "is_top1"))
    loss = model(**_batch(packed=packed), fused_lm_head=True).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: value.grad for name, value in model.named_parameters()}}


def compare() -> bool:
    """Print how far the patched head is from TRL's own, as a share of the largest entry; return whether all agree."""
    cases = [(tied, packed, at) for tied in (True, False) for packed in (False, True) for at in (1.0, 0.7)]
    stock = [_loss_and_gradients(*case) for case in cases]
    install()
    agree = True
    for (tied, packed, temperature), expected in zip(cases, stock, strict=True):
        found = _loss_and_gradients(tied, packed, temperature)
        gaps = {name: float((found[name] - value).abs().max() / value.abs().max()) for name, value in expected.items()}
        ok = all(gap <= TOLERANCE for gap in gaps.values())  # false for NaN, which max() may pass over
        agree = agree and ok
        loss, worst = gaps.pop("loss"), max(gaps, key=lambda name: gaps[name])
        case = f"{'tied' if tied else 'untied'} head, {'packed' if packed else 'padded'} rows"
        print(
            f"{'ok  ' if ok else 'MISS'}  {case}, temperature {temperature}: loss {expected['loss']:.6f}, "
            f"gap {loss:.1e}; {len(gaps)} gradients, largest gap {gaps[worst]:.1e} in {worst} "
            f"(target <= {TOLERANCE:.0e})"
        )
    return agree


if __name__ == "__main__":
    from measure import heading

    print(heading("trl", "transformers"))
    sys.exit(not compare())
