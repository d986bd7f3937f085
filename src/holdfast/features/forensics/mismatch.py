"""Explains why an engine's log-probabilities differ from the trainer's, by trying causes on completions of one step.

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

from holdfast.data.batches.packing import Share, pack, to_device
from holdfast.models.chunks.logits import HeadWeights, factors_of, logits_of
from holdfast.models.heads.policy import without_dropout
from holdfast.models.support import Support
from holdfast.training.policy.experience import samples_of
from holdfast.training.run import Model
from holdfast.types import Example, Finish, Group, Trajectory

AGREES = {"float32": 1e-4, "float64": 1e-4, "bfloat16": 0.05}
"""Mean difference in nats below which there is nothing to explain, by what the trainer computes in."""
HELPS = 5.0
"""A cause that explains a difference makes it smaller by this factor at least."""
_TEMPERATURES = tuple(round(0.1 * number, 1) for number in range(1, 21))
_TOP_K = (5, 10, 20, 50, 100)
_TOP_P = (0.8, 0.9, 0.95, 0.99)
EVERY_TOKEN = Support()
"""Every token."""

CauseTried = Callable[[Tensor, Tensor], Tensor]
"""From logits [C, V] and chosen tokens [C] to their log-probabilities [C]."""

Way = Callable[[Tensor, int], Tensor]
"""From [P + C] tokens and P to [C, V] logits of the completion."""


@dataclass(frozen=True)
class Fit:
    """The distance between the log-probabilities that a cause predicts and those that the engine returned."""

    cause: str
    mean: float
    """Mean absolute difference, in nats."""
    largest: float


def at_temperature(temperature: float, support: Support = EVERY_TOKEN, *, keeps_chosen: bool = False) -> CauseTried:
    """Return what log-probabilities are at a temperature, renormalised over the support that is sampled from.

    Args:
        temperature: That divides logits.
        support: What is left of the vocabulary.
        keeps_chosen: A chosen token is of the support whatever rounding says, as the trainer has it.
    """

    def chosen(logits: Tensor, tokens: Tensor) -> Tensor:
        restricted = support.restrict(logits / temperature, tokens if keeps_chosen else None)
        return restricted.log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    return chosen


def causes(temperature: float, support: Support = EVERY_TOKEN, *, renormalised: bool = False) -> dict[str, CauseTried]:
    """Return the causes that are tried on one pass of the trainer; the first assumes no error.

    Args:
        temperature: Of the run.
        support: What the run's own top_k, top_p and min_p leave.
        renormalised: Whether the trainer scores over that support (`rollout.renormalise`).
    """
    run_support = support if renormalised else EVERY_TOKEN
    which = "the tokens that rollout.top_k, top_p and min_p leave" if renormalised else "all tokens"
    as_it_was = at_temperature(temperature, run_support, keeps_chosen=True)
    tried = {f"temperature {temperature:g}, {which}": as_it_was}
    for wrong_temperature in _TEMPERATURES:
        if wrong_temperature != temperature:
            name = f"temperature: sampled at {wrong_temperature:g}, scored at {temperature:g}"
            tried[name] = at_temperature(wrong_temperature, run_support, keeps_chosen=True)
    for k in _TOP_K:
        name = f"top_k support: renormalised over the {k} most probable tokens"
        tried[name] = at_temperature(temperature, Support(top_k=k))
    for p in _TOP_P:
        name = f"top_p support: renormalised over the tokens that reach {p:g}"
        tried[name] = at_temperature(temperature, Support(top_p=p))
    if support != EVERY_TOKEN:
        kind = "top_p support" if support.top_k is None else "top_k support"
        if renormalised:
            tried[f"{kind}: not renormalised, over all tokens"] = at_temperature(temperature)
        else:
            name = f"{kind}: renormalised over what rollout.top_k, top_p and min_p leave, as the run asks for"
            tried[name] = at_temperature(temperature, support, keeps_chosen=True)
    return tried


WHY_NOT = {
    "stop tokens": "no token ended a completion, or every one did",
    "re-encoding": "the text of every completion, or of none, is cut into the same tokens again",
    "routing": "the model has no experts, or no token's change by rounding",
    "kernel": "transformers has no attention for this model by itself",
}
"""Of causes that may not apply to a step: why."""
CAUSES = (
    "temperature", "top_k support", "top_p support", "stop tokens", "stale weights", "prefix cache", "dtype", "kernel",
    "routing", "re-encoding",
)  # fmt: skip
"""All that are tried, as the words before the colon of each `Fit.cause`."""


def best_of_each(tried: Sequence[Fit]) -> list[Fit]:
    """Return the nearest fit of each cause, the nearest first."""
    best: dict[str, Fit] = {}
    for fit in sorted(tried, key=lambda fit: fit.mean):
        best.setdefault(fit.cause.partition(":")[0], fit)
    return list(best.values())


def fits(model: Model, groups: Sequence[Group], tried: Mapping[str, CauseTried]) -> list[Fit]:
    """Return how near each cause comes, on the present weights; one process."""
    return [fit_of(cause, differences) for cause, differences in differences_of(trainer(model), groups, tried).items()]


@torch.no_grad()
def differences_of(way: Way, groups: Sequence[Group], tried: Mapping[str, CauseTried]) -> dict[str, Tensor]:
    """Return [N] absolute differences in nats of all tokens, by cause; NaN where the engine told nothing."""
    differences: dict[str, list[Tensor]] = {cause: [] for cause in tried}
    for size, tokens, engine_logprobs in completions_of(groups):
        sequence, told = torch.from_numpy(tokens), torch.from_numpy(engine_logprobs).double()
        logits = way(sequence, size)
        for cause, logprobs_of in tried.items():
            logprobs = logprobs_of(logits, sequence[size:].to(logits.device))
            differences[cause].append((logprobs.cpu().double() - told).abs())
    return {cause: torch.cat(parts) for cause, parts in differences.items()}


def trainer(model: Model) -> Way:
    """Return how the trainer itself computes logits, the head's product in float32 where `model.head.dtype` says so."""

    def logits(tokens: Tensor, size: int) -> Tensor:
        example = Example(0, 0, tokens.numpy(), np.arange(len(tokens)) >= size)
        batch = pack([example], [Share(1.0, 1.0)], padded=model.module.padded)
        seen: list[Tensor] = []

        def look(hidden: Tensor, head: HeadWeights) -> None:
            spec = model.module.head_spec
            seen.append(logits_of(*factors_of(hidden, head, spec), spec)[0])

        with without_dropout(model.module):
            model.module.show_predictors(to_device(batch, model.run.world.device), look)
        return seen[0]

    return logits


def fits_without(model: Model, groups: Sequence[Group], logprobs_of: CauseTried) -> list[Fit]:
    """Return how near trainer and engine are without the tokens that a cause would spoil, where it would spoil some."""
    tokenizer: Any = model.blueprint.tokenizer
    (differences,) = differences_of(trainer(model), groups, {"as it was": logprobs_of}).values()
    ends, cut_otherwise = [], []
    for size, trajectory in _chosen(groups):
        sampled = trajectory.tokens[size:].tolist()
        end = np.zeros(len(sampled), np.bool_)
        end[-1] = trajectory.finish is Finish.STOP
        ends.append(end)
        text = tokenizer.decode(sampled, skip_special_tokens=False)
        encoded = list(tokenizer.encode(text, add_special_tokens=False))
        cut_otherwise.append(np.full(len(sampled), encoded != sampled))
    spoilt = {
        "stop tokens: all but the tokens that end completions agree": torch.from_numpy(np.concatenate(ends)),
        "re-encoding: all completions agree whose text is cut into the same tokens again": torch.from_numpy(
            np.concatenate(cut_otherwise)
        ),
    }
    return fits_on_the_rest(differences, spoilt)


def fits_on_the_rest(differences: Tensor, spoilt: Mapping[str, Tensor]) -> list[Fit]:
    """Return how near they are without the spoilt tokens of each cause; a cause that spoils none, or all, is left out.

    Args:
        differences: [N], of all tokens.
        spoilt: [N] bool each.
    """
    return [fit_of(cause, differences[~marks]) for cause, marks in spoilt.items() if 0 < int(marks.sum()) < len(marks)]


def completions_of(groups: Sequence[Group]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float32]]]:
    """Yield the length of a prompt, [P + C] tokens and [C] what the engine told of its own, of each completion.

    Of tokens that were observed in an episode, and of those that it told nothing of, there is NaN.
    """
    for size, sample in _chosen(groups):
        logprobs = sample.sampler_logprobs
        if sample.episode is not None:
            logprobs = np.where(sample.weights_versions < 0, np.float32("nan"), logprobs)
        yield size, sample.tokens, logprobs[size:]


def _chosen(groups: Sequence[Group]) -> Iterator[tuple[int, Trajectory]]:
    for group in groups:
        for sample in (sample for trajectory in group.trajectories for sample in samples_of(trajectory)):
            if sample.tokens.size > group.prompt.tokens.size:
                yield group.prompt.tokens.size, sample


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
