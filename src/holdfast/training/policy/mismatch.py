"""Why an engine's log-probabilities differ from the trainer's: causes tried one by one on completions of one step.

Most causes say what the log-probabilities would be if they were at work: at another temperature, renormalised over
fewer tokens, of the step before, behind keys and values of older weights, in bfloat16, by another kernel. Others say
which tokens they spoil: those that end completions, those that another tokenisation would cut otherwise, those whose
experts change by rounding; without these the rest agrees. The cause that leaves least is the likely one; where no cause
helps much, the tool says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.data.batches.packing import pack, to_device
from holdfast.data.batches.weights import Share
from holdfast.models.heads.policy import without_dropout
from holdfast.models.scores import HeadWeights, logits_of
from holdfast.training.run import ShardedModel
from holdfast.types import Example, Finish, Group, Trajectory

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


def fits(sharded: ShardedModel, groups: Sequence[Group], tried: dict[str, CauseTried]) -> list[Fit]:
    """Return how near each cause comes, on the present weights; one process."""
    return [fit_of(cause, torch.cat(parts)) for cause, parts in differences_of(sharded, groups, tried).items()]


@torch.no_grad()
def differences_of(
    sharded: ShardedModel, groups: Sequence[Group], tried: dict[str, CauseTried]
) -> dict[str, list[Tensor]]:
    """Return [C] differences of each completion, by cause, on the present weights; one process."""
    differences: dict[str, list[Tensor]] = {cause: [] for cause in tried}
    for prompt_size, tokens, told in completions_of(groups):
        example = Example(0, 0, tokens, np.arange(tokens.size) >= prompt_size)
        batch = pack([example], [Share(1.0, 1.0)], padded=sharded.model.padded)
        logits: list[Tensor] = []

        def look(hidden: Tensor, head: HeadWeights, into: list[Tensor] = logits) -> None:
            into.append(logits_of(hidden, head, sharded.model.head_spec)[0])

        with without_dropout(sharded.model):
            sharded.model.show_predictors(to_device(batch, sharded.setting.world.device), look)
        chosen = torch.from_numpy(tokens[prompt_size:]).to(logits[0].device)
        for cause, logprobs_of in tried.items():
            differences[cause].append(apart(logprobs_of(logits[0], chosen), told))
    return differences


def apart(logprobs: Tensor, told: np.ndarray) -> Tensor:
    """Return [C] absolute differences in nats, NaN where the engine told nothing."""
    return (logprobs.cpu().double() - torch.from_numpy(told).double()).abs()


def fits_without(sharded: ShardedModel, groups: Sequence[Group], temperature: float) -> list[Fit]:
    """Return how near trainer and engine are without the tokens that a cause would spoil, where it would spoil some."""
    cause = "as it was"
    differences = torch.cat(differences_of(sharded, groups, {cause: at_temperature(temperature)})[cause])
    ends, cut_otherwise = [], []
    for size, trajectory in _chosen(groups):
        chosen = trajectory.tokens[size:].tolist()
        end = np.zeros(len(chosen), np.bool_)
        end[-1] = trajectory.finish is Finish.STOP
        ends.append(end)
        cut_otherwise.append(np.full(len(chosen), _encoded_again(sharded.origin.tokenizer, chosen) != chosen))
    spoilt = {
        "stop tokens: all but the tokens that end completions agree": torch.from_numpy(np.concatenate(ends)),
        "re-encoding: all completions agree whose text is cut into the same tokens again": torch.from_numpy(
            np.concatenate(cut_otherwise)
        ),
    }
    return fits_on_the_rest(differences, spoilt)


def _encoded_again(tokenizer: Any, tokens: list[int]) -> list[int]:
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def fits_on_the_rest(differences: Tensor, spoilt: Mapping[str, Tensor]) -> list[Fit]:
    """Return how near they are without the spoilt tokens of each cause; a cause that spoils none, or all, is left out.

    Args:
        differences: [N], of all tokens.
        spoilt: [N] bool each.
    """
    return [fit_of(cause, differences[~marks]) for cause, marks in spoilt.items() if 0 < int(marks.sum()) < len(marks)]


def completions_of(groups: Sequence[Group]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float32]]]:
    """Yield the length of a prompt, [P + C] tokens and [C] what the engine told of its own, of each completion."""
    for size, trajectory in _chosen(groups):
        yield size, trajectory.tokens, trajectory.sampler_logprobs[size:]


def _chosen(groups: Sequence[Group]) -> Iterator[tuple[int, Trajectory]]:
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.tokens.size > group.prompt.tokens.size:
                yield group.prompt.tokens.size, trajectory


def fit_of(cause: str, differences: Tensor) -> Fit:
    """Return how near a cause comes; what the engine told nothing of does not count."""
    differences = differences[~differences.isnan()]
    # A token outside of a support has minus infinity there: the cause is not it.
    differences = torch.nan_to_num(differences, posinf=1e3)
    if not differences.numel():
        return Fit(cause, float("inf"), float("inf"))
    return Fit(cause, float(differences.mean()), float(differences.max()))


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
