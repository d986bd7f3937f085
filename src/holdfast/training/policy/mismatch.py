"""Why an engine's log-probabilities differ from the trainer's: causes tried one by one on completions of one step.

Each cause says what the log-probabilities would be if it were at work: at another temperature, renormalised over fewer
tokens, of weights in bfloat16, of the step before. The one that brings them nearest to what the engine told is the
likely one; where no cause helps much, the tool says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holdfast.data.batches.packing import pack, to_device
from holdfast.data.batches.weights import Share
from holdfast.models.heads.policy import without_dropout
from holdfast.models.scores import HeadWeights, logits_of
from holdfast.training.run import ShardedModel
from holdfast.types import Example, Group

AGREES = {"float32": 1e-4, "float64": 1e-4, "bfloat16": 0.05}
"""Mean difference in nats below which there is nothing to explain, by what the trainer computes in."""
HELPS = 5.0
"""A cause that explains a difference makes it smaller by this factor at least."""
_TEMPERATURES = tuple(round(0.1 * number, 1) for number in range(1, 21))
_TOP_K = (5, 10, 20, 50, 100)
_TOP_P = (0.8, 0.9, 0.95, 0.99)

CauseTried = Callable[[Tensor, Tensor], Tensor]
"""From logits [C, V] and chosen tokens [C] to their log-probabilities [C]."""


@dataclass(frozen=True)
class Fit:
    """How near a cause comes to what the engine told."""

    cause: str
    mean: float
    """Of the absolute differences, in nats."""
    largest: float


def at_temperature(temperature: float, top_k: int | None = None, top_p: float = 1.0) -> CauseTried:
    """Return what log-probabilities are at a temperature, renormalised over the support that is sampled from."""

    def chosen(logits: Tensor, tokens: Tensor) -> Tensor:
        scaled = logits / temperature
        if top_k is not None and top_k < scaled.shape[-1]:
            scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[:, -1:], -torch.inf)
        if top_p < 1:
            ordered, places = scaled.softmax(-1).sort(-1, descending=True)
            outside = torch.zeros_like(scaled, dtype=torch.bool)
            outside.scatter_(1, places, ordered.cumsum(-1) - ordered >= top_p)
            scaled = scaled.masked_fill(outside, -torch.inf)
        return scaled.log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    return chosen


def causes(temperature: float) -> dict[str, CauseTried]:
    """Return what is tried on one pass of the trainer; the first is that nothing is wrong."""
    tried = {f"temperature {temperature:g}, all tokens": at_temperature(temperature)}
    for other in _TEMPERATURES:
        if other != temperature:
            tried[f"temperature: sampled at {other:g}, scored at {temperature:g}"] = at_temperature(other)
    for k in _TOP_K:
        tried[f"support: renormalised over the {k} most probable tokens (top_k)"] = at_temperature(temperature, k)
    for p in _TOP_P:
        tried[f"support: renormalised over the tokens that reach {p:g} (top_p)"] = at_temperature(temperature, None, p)
    return tried


@torch.no_grad()
def fits(sharded: ShardedModel, groups: Sequence[Group], tried: dict[str, CauseTried]) -> list[Fit]:
    """Return how near each cause comes, on the present weights; one process."""
    differences: dict[str, list[Tensor]] = {cause: [] for cause in tried}
    for prompt_size, tokens, told in _completions(groups):
        example = Example(0, 0, tokens, np.arange(tokens.size) >= prompt_size)
        batch = pack([example], [Share(1.0, 1.0)], padded=sharded.model.padded)
        logits: list[Tensor] = []

        def look(hidden: Tensor, head: HeadWeights, into: list[Tensor] = logits) -> None:
            into.append(logits_of(hidden, head, sharded.model.head_spec)[0])

        with without_dropout(sharded.model):
            sharded.model.show_predictors(to_device(batch, sharded.setting.world.device), look)
        chosen = torch.from_numpy(tokens[prompt_size:]).to(logits[0].device)
        known_places = torch.from_numpy(np.isfinite(told))
        for cause, logprobs_of in tried.items():
            apart = (logprobs_of(logits[0], chosen).cpu().double() - torch.from_numpy(told).double()).abs()
            differences[cause].append(apart[known_places])
    return [_fit(cause, torch.cat(parts)) for cause, parts in differences.items()]


def _completions(groups: Sequence[Group]) -> Iterable[tuple[int, np.ndarray, np.ndarray]]:
    for group in groups:
        for trajectory in group.trajectories:
            size = group.prompt.tokens.size
            if trajectory.tokens.size > size:
                yield size, trajectory.tokens, trajectory.sampler_logprobs[size:]


def _fit(cause: str, apart: Tensor) -> Fit:
    # A token outside of a support has minus infinity there: the cause is not it.
    apart = torch.nan_to_num(apart, nan=float("inf"), posinf=1e3)
    return Fit(cause, float(apart.mean()), float(apart.max()))


def verdict(ranked: Sequence[Fit], nothing: Fit, dtype: str) -> str:
    """Return the sentence that a user reads first."""
    if nothing.mean <= AGREES[dtype]:
        return f"nothing to explain: engine and trainer differ by {nothing.mean:.1e} nats in the mean"
    best = ranked[0]
    if best.mean * HELPS > nothing.mean:
        return (
            f"engine and trainer differ by {nothing.mean:.2g} nats in the mean, and no cause that was tried explains "
            f"it; the nearest leaves {best.mean:.2g} ({best.cause})"
        )
    return f"{best.cause}: the difference falls from {nothing.mean:.2g} to {best.mean:.2g} nats in the mean"
