"""Before step 1: our path through the model against transformers' own, on a few tokens.

A soft cap we do not know of, a logit scale under a new name, an attention that sees across documents: each would train
on wrong numbers without an error. Two short documents show it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.data.packing import pack, to_device
from holdfast.data.vision import ImageSide
from holdfast.data.weights import Share
from holdfast.errors import ModelError
from holdfast.models.attention import upstream_attention
from holdfast.models.policy import PolicyModel
from holdfast.models.scorer import ScoreModel
from holdfast.models.vision import set_attention
from holdfast.types import Example, Scores

LENGTHS = (19, 23)
TOLERANCE = {torch.float64: 5e-4, torch.float32: 5e-4, torch.bfloat16: 0.1}
"""Difference of log-probabilities; normalisation layers compute in float32 even in a float64 model."""
LEAK_TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-5, torch.bfloat16: 0.03}


@dataclass(frozen=True)
class CheckResult:
    """What the check measured: the largest change of a token's log-probability, the mean change in bfloat16."""

    difference: float
    """Between our log-probabilities and transformers'."""
    leak: float
    """Of one document's log-probabilities when the other document changes."""


@torch.no_grad()
def check_forward(
    policy: PolicyModel,
    *,
    may_fall_back: bool,
    compute_dtype: torch.dtype,
    device: torch.device | None = None,
    images: ImageSide | None = None,
    all_agree: Callable[[bool], bool] = bool,
) -> tuple[CheckResult, str]:
    """Compare, and fall back to one document per row if packing is not exact and may be given up.

    All ranks call this together.

    Args:
        policy: Sharded and filled.
        may_fall_back: `model.attention: auto`.
        compute_dtype: Sets the tolerance.
        device: Where the model computes.
        images: Then one of the documents has an image.
        all_agree: Whether something is true on all ranks; each measures with its own device, and all must take the
            same path.

    Returns:
        What was measured, and a note for the user ("" if there is nothing to say).

    Raises:
        ModelError: Our path differs from transformers'.
    """
    policy.eval()
    note, chooses = "", may_fall_back and not policy.padded
    try:
        result = _measure(policy, compute_dtype, device, images)
        exact = _exact(result, compute_dtype)
        reason = f"packed documents see each other (by {result.leak:.1e})" if result.leak else "packing is not exact"
    except ModelError as error:
        if not chooses:
            raise
        exact, reason = False, str(error).split(". ")[0]
        result = CheckResult(float("inf"), float("inf"))
    if chooses and not (exact := all_agree(exact)):
        use_padding(policy)
        note = f"attention: one document per row, since {reason}"
        result = _measure(policy, compute_dtype, device, images)
        exact = _exact(result, compute_dtype)
    policy.train()
    if not exact:
        raise ModelError(
            f"Log-probabilities of {policy.family.name} differ from transformers' own by {result.difference:.2e} "
            f"(between documents: {result.leak:.2e}). Its logits or its attention follow a rule Holdfast does not "
            "know; please report the architecture."
        )
    return result, note


def use_padding(policy: PolicyModel) -> None:
    """Switch to one document per row and transformers' own attention."""
    policy.padded = True
    policy.language_model.set_attn_implementation(upstream_attention(policy.language_model))  # type: ignore[operator]


def _exact(result: CheckResult, dtype: torch.dtype) -> bool:
    return result.difference <= TOLERANCE[dtype] and result.leak <= LEAK_TOLERANCE[dtype]


def _measure(
    policy: PolicyModel, dtype: torch.dtype, where: torch.device | None, images: ImageSide | None
) -> CheckResult:
    model: Any = policy.language_model
    device = where or next(policy.buffers(), torch.zeros(0)).device
    vocabulary = int(model.config.get_text_config().vocab_size)
    first, changed, second = _documents(vocabulary, images)
    ours = _ours(policy, [first, second], device)
    after = _ours(policy, [changed, second], device)
    ours_attention = model.config.get_text_config()._attn_implementation  # noqa: SLF001 - set_attn_implementation's
    if not policy.padded:
        set_attention(model, upstream_attention(model))
    theirs = [_theirs(policy, document, images, device) for document in (first, second)]
    if not policy.padded:
        set_attention(model, ours_attention)
    scale = _scale(torch.cat(theirs)) if isinstance(policy, ScoreModel) else 1.0
    difference, leak = _change(torch.cat(ours), torch.cat(theirs), dtype), _change(ours[1], after[1], dtype)
    return CheckResult(difference / scale, leak / scale)


def _documents(vocabulary: int, images: ImageSide | None) -> tuple[Example, Example, Example]:
    """Return a document, the same with other tokens, and another one; the first two have an image if there may be."""
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, vocabulary, size) for size in (LENGTHS[0], LENGTHS[0], LENGTHS[1])]
    if images is not None:
        plain = next(token for token in range(vocabulary) if token not in images.marks)
        texts = [np.where(np.isin(tokens, images.marks), plain, tokens) for tokens in texts]
    found = []
    for index, tokens in enumerate(texts):
        if images is None:
            found.append(Example(index, index, tokens, np.arange(tokens.size) > 0))
            continue
        if index < len(texts) - 1:
            tokens[tokens.size // 3] = images.image_id
        found.append(images.probe(tokens, index))
    return found[0], found[1], found[2]


def _theirs(policy: PolicyModel, example: Example, images: ImageSide | None, device: torch.device) -> Tensor:
    inputs: dict[str, Tensor] = {}
    if images is not None and example.model_inputs:
        given = images.upstream_inputs(example.tokens, example.model_inputs)
        inputs = {name: torch.as_tensor(values, device=device) for name, values in given.items()}
    logprobs = policy.upstream_logprobs(torch.as_tensor(example.tokens, device=device), inputs)
    return logprobs[torch.as_tensor(example.loss_mask[1:], device=device)]


def _change(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> float:
    change = (ours - theirs).abs()
    # Rounding to bfloat16 sends a token or two to other experts; a rule we do not know moves all of them.
    return float(change.mean() if dtype == torch.bfloat16 else change.max())


def _scale(scores: Tensor) -> float:
    # Log-probabilities have a size of their own. Scores may be large, and are rounded in proportion.
    return max(1.0, float(scores.abs().mean()))


def _ours(policy: PolicyModel, examples: list[Example], device: torch.device) -> list[Tensor]:
    batch = to_device(pack(examples, [Share(1.0, 1.0)] * len(examples), padded=policy.padded), device)
    scores = policy(batch)
    assert isinstance(scores, Scores)
    return list(torch.split(scores.logprobs, [example.trained_tokens for example in examples]))
