"""The built parts of a run on preferences, and what its losses compare the policy with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from holdfast.data.batches.assembly import Layout
from holdfast.training.evaluate import evaluate
from holdfast.training.preference.kto import answered_by_next_rows, divergence
from holdfast.training.run import Evaluation, Run
from holdfast.training.scorers.reference import Reference
from holdfast.training.scorers.scoring import scored
from holdfast.types import MiniBatch


@dataclass(kw_only=True)
class PreferenceEvaluation(Evaluation):
    """A policy, and what its answers are compared with."""

    takes_pairs: bool
    """Whether two answers to a prompt are compared, and not single ones judged."""
    layout: Layout
    """How its batches are packed."""
    reference: Reference | None
    """The policy as it was at the start of the run, frozen; None where no loss asks for it, or where rows carry what it
    said."""


@dataclass(kw_only=True)
class PreferenceRun:
    """Everything a step touches."""

    common: Run
    """What every run has."""
    evaluation: PreferenceEvaluation
    """Of the policy that is trained."""


def compared_with_reference(evaluation: PreferenceEvaluation, mini_batch: MiniBatch) -> MiniBatch:
    """Add the reference's log-probabilities, and for single answers the KL divergence; all ranks call this together."""
    sharded, layout, reference = evaluation.sharded, evaluation.layout, evaluation.reference
    if layout.brings_other_answers:
        with sharded.setting.phase("divergence"):
            return _with_divergence(mini_batch, divergence(sharded, mini_batch.other_answers))
    if reference is None:
        return mini_batch
    with sharded.setting.phase("reference"):
        result = scored(sharded, reference, mini_batch, "reference_logprobs")
    if evaluation.takes_pairs:
        return result
    with sharded.setting.phase("divergence"):
        others = answered_by_next_rows(sharded, reference, mini_batch, layout)
        return _with_divergence(result, divergence(sharded, others))


def _with_divergence(mini_batch: MiniBatch, kl: float) -> MiniBatch:
    """Let every token carry z0."""
    return replace(
        mini_batch,
        micro_batches=tuple(
            replace(
                batch,
                per_token={**batch.per_token, "kl": torch.full_like(batch.weights, kl, dtype=torch.float64)},
            )
            for batch in mini_batch.micro_batches
        ),
    )


def evaluate_preferences(
    evaluation: PreferenceEvaluation, label: str | None = None, *, interrupted: Callable[[], bool] = lambda: False
) -> dict[str, float]:
    """Return eval/<set>/<metric>, as `evaluate`; a loss is compared there with what it is compared with in training."""
    return with_margins(evaluate(evaluation, label, interrupted, partial(compared_with_reference, evaluation)))


def with_margins(metrics: dict[str, float]) -> dict[str, float]:
    """Add rewards/margins where single answers gave rewards of both kinds; leave out what speaks of no answer."""
    line = {name: value for name, value in metrics.items() if name not in _of_nothing(metrics)}
    for name in list(line):
        side = name.removesuffix("rewards/chosen")
        if name != side and f"{side}rewards/rejected" in line and f"{side}rewards/margins" not in line:
            line[f"{side}rewards/margins"] = line[name] - line[f"{side}rewards/rejected"]
    return line


def _of_nothing(metrics: dict[str, float]) -> set[str]:
    """Return the means over the other side's answers where all are desirable, or none is."""
    empty = {1.0: "rejected", 0.0: "chosen"}
    return {
        f"{name.removesuffix('kto/desirable')}{what}/{empty[share]}"
        for name, share in metrics.items()
        if name.endswith("kto/desirable") and share in empty
        for what in ("rewards", "logps")
    }
