"""The check before step 1: forward passes, lengths and gradients against what transformers makes of a model's files."""

from __future__ import annotations

from time import perf_counter

import torch

from holdfast.data.tokens.vision import ImageSide
from holdfast.models.check.forward import CheckResult, Sides, check_forward
from holdfast.models.check.witness import witness_of
from holdfast.training.build.gradient_check import Gradients, check_gradients
from holdfast.training.run import ShardedModel


def check_model(sharded: ShardedModel, images: ImageSide | None) -> list[str]:
    """Check a model that is sharded and filled; return what to print. All ranks call this together.

    Raises:
        ModelError: Its outputs or gradients are not those of the model in its files; the same on all ranks.
    """
    start = perf_counter()
    config, origin, ranks = sharded.setting.config, sharded.origin, sharded.setting.ranks
    policy, plan = sharded.model, sharded.plan
    witness = witness_of(type(origin.skeleton), origin.original_config)
    sides = Sides(policy, witness, getattr(torch, plan.compute_dtype), sharded.setting.world.device, images)
    may_fall_back = config.model.attention == "auto"
    result, note = ranks.on_all_ranks(
        lambda: check_forward(sides, may_fall_back=may_fall_back, all_agree=lambda agrees: all(ranks.gather(agrees))),
    )
    forward, gradients = perf_counter(), None
    if config.model.check_gradients and any(value.requires_grad for value in policy.parameters()):
        gradients = ranks.on_all_ranks(lambda: check_gradients(sides, plan, dropout=config.model.dropout))
    compared = "scores" if config.scores else "log-probabilities"
    difference = result.difference * result.spread
    parts = [_forward_words(result, forward - start), _gradient_words(gradients, perf_counter() - forward)]
    return [
        note,
        f"forward check: {compared} agree with transformers to {difference:.1e}",
        f"checked against transformers: {'; '.join(part for part in parts if part)}",
    ]


def _forward_words(result: CheckResult, seconds: float) -> str:
    words = "forward passes"
    if result.lengths.seen:
        words += f", lengths up to and beyond {', '.join(map(str, result.lengths.seen))}"
    if result.lengths.too_long:
        words += f" (not {', '.join(map(str, result.lengths.too_long))}, which would take too long)"
    return f"{words} {seconds:.1f} s"


def _gradient_words(gradients: Gradients | None, seconds: float) -> str:
    if gradients is None:
        return ""
    words = f"gradients of {gradients.parameters} parameters {seconds:.1f} s"
    return f"{words} (of {gradients.name} off by {gradients.worst:.0e} of its length or angle, none by more)"
