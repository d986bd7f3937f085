"""Computes the log-probabilities of an engine with other kernels or dtypes, as causes for `holdfast explain-mismatch`.

A plain transformers model with the policy's weights stands in for the engine: with another kernel, in bfloat16, or
behind keys and values that an earlier step's weights left in a cache. Where there are experts, tokens whose experts
change by the rounding of bfloat16 are near a tie, and another engine may send them elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.features.forensics.mismatch import (
    CauseTried,
    Fit,
    Way,
    completions_of,
    differences_of,
    fit_of,
    fits_on_the_rest,
)
from holdfast.models.layers.attention import cache_argument, cache_of
from holdfast.models.layers.routers import Routers, routers_of
from holdfast.parallel.stream import live_tensors
from holdfast.rollout.local.replica import Replica
from holdfast.training.run import Model
from holdfast.types import Group

_KERNELS = ("eager", "sdpa", "flash_attention_2")
_BLOCKS = (1, 16, 128)
"""Tokens of a cache's block; only whole blocks of a prompt are in it."""


def plain_copy(model: Model, dtype: torch.dtype | None = None, attention: str | None = None) -> Replica:
    """Return a plain model with the policy's present weights, which do not follow it; one process."""
    computed: torch.dtype = getattr(torch, model.plan.compute_dtype)
    replica = Replica(model.blueprint, model.run.world.device, dtype or computed, attention)
    replica.refresh((name, tensor.detach().clone()) for name, tensor in live_tensors(model.module))
    return replica


@torch.no_grad()
def fits_elsewhere(
    model: Model,
    groups: Sequence[Group],
    logprobs_of: CauseTried,
    earlier: tuple[Replica, str] | None,
    kernels: Sequence[str] = _KERNELS,
) -> list[Fit]:
    """Return how near other ways to compute come, on the present weights; one process.

    Args:
        model: The policy.
        groups: What the engine sampled.
        logprobs_of: From logits, as the run has it.
        earlier: The policy of an earlier step, and that step in words; None where there is none.
        kernels: What transformers calls them.
    """
    ways: dict[str, Way] = {}
    for kernel in kernels:
        try:
            ways[f"kernel: attention by transformers' {kernel}"] = _whole(plain_copy(model, attention=kernel))
        except (ValueError, ImportError):
            continue  # transformers has no such attention for this model
    low = plain_copy(model, torch.bfloat16)
    ways["dtype: computed in bfloat16"] = _whole(low)
    if earlier is not None:
        present = plain_copy(model)
        for block in _BLOCKS:
            blocks = "" if block == 1 else f", whole blocks of {block} tokens"
            name = f"prefix cache: keys and values of prompts are of {earlier[1]}{blocks}"
            ways[name] = _behind_a_cache(earlier[0], present, block)
    fits = []
    for cause, way in ways.items():
        (differences,) = differences_of(way, groups, {cause: logprobs_of}).values()
        fits.append(fit_of(cause, differences))
    if routers_of(low.model):
        fits += _routing(groups, logprobs_of, plain_copy(model), low)
    return fits


def _whole(replica: Replica) -> Way:
    def logits(tokens: Tensor, size: int) -> Tensor:
        scores: Tensor = replica.model(input_ids=tokens[None].to(replica.device), use_cache=False).logits
        return scores[0, size - 1 : -1].float().cpu()

    return logits


def _behind_a_cache(earlier: Replica, present: Replica, block: int) -> Way:
    """Return how a completion reads whole blocks of its prompt from a cache that older weights filled."""

    def logits(tokens: Tensor, size: int) -> Tensor:
        cached = (size - 1) // block * block  # the last token of a prompt is computed: its logits are asked for
        row = tokens[None].to(present.device)
        if cached == 0:
            return _whole(present)(tokens, size)
        cache = cache_argument(present.model, cache_of(earlier.model(input_ids=row[:, :cached], use_cache=True)))
        scores: Tensor = present.model(input_ids=row[:, cached:], use_cache=True, **cache).logits
        return scores[0, size - 1 - cached : -1].float().cpu()

    return logits


def _routing(groups: Sequence[Group], logprobs_of: CauseTried, exact: Replica, low: Replica) -> list[Fit]:
    near_ties = []
    replicas = {replica: Routers(replica.model) for replica in (exact, low)}
    for size, tokens, _ in completions_of(groups):
        choices = []
        for replica, routers in replicas.items():
            with routers.choices() as layers:
                replica.model(input_ids=torch.from_numpy(tokens)[None].to(replica.device), use_cache=False)
            choices.append(torch.stack([layer.reshape(tokens.size, -1).sort(-1).values.cpu() for layer in layers]))
        moved = (choices[0] != choices[1]).any(-1).any(0)  # [P + C]
        near_ties.append(moved[size - 1 : -1])
    (differences,) = differences_of(_whole(exact), groups, {"as it was": logprobs_of}).values()
    name = "routing: all but tokens whose experts change by rounding agree"
    return fits_on_the_rest(differences, {name: torch.cat(near_ties)})
