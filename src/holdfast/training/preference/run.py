"""The parts of a run on preferences, and the quantities that its losses need: reference log-probabilities, KTO's z0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.data.batches.assembly import Layout, assemble
from holdfast.data.batches.candidates import Candidates, Ranks, SequenceInfo
from holdfast.data.batches.packing import to_device, unpack
from holdfast.data.content.model_inputs import going_on
from holdfast.models.heads.policy import without_dropout
from holdfast.objectives.base import ratio, scored_tokens
from holdfast.objectives.pairs import answers_of
from holdfast.parallel.collectives import reduce_sums
from holdfast.training.evaluate import evaluate
from holdfast.training.other_models.reference import Reference, scored
from holdfast.training.run import Evaluation, Model, Training
from holdfast.types import Batch, Example, MiniBatch, Scores, host_value


@torch.no_grad()
def divergence(model: Model, batches: Sequence[Batch]) -> float:
    """Return KTO's z0 of an update in nats per answer, the same on every rank; all ranks call this together.

    Ethayarajh et al., "KTO" (arXiv:2402.01306), section 4: z0 = max(0, mean of log policy(y' | x) - log reference(y' |
    x) over pairs (x, y') of the batch, y' an answer to another prompt), without a gradient. Here the batch is the whole
    update, over all ranks: z0 is known before its first forward pass, so it does not depend on how that is split. Every
    prompt is followed by the answer of the next row in draw order. Deviation: the authors' code takes z0 per
    micro-batch.

    Where the update has one row, z0 is 0.

    Args:
        model: The policy.
        batches: The update's prompts with answers of other rows and what the reference says of them; as many batches on
            every rank.
    """
    if not batches:
        return 0.0
    sums = {"kl": torch.zeros(2, dtype=torch.float64, device=model.run.world.device)}
    with without_dropout(model.module):
        for host_batch in batches:
            batch = to_device(host_batch, model.run.world.device)
            scores = model.module(batch, temperature=model.temperature)
            assert isinstance(scores, Scores)
            answers = answers_of(scores.logprobs, scored_tokens(batch), compared=True)
            sums["kl"] += ratio(answers.log_ratios.sum(), answers.log_ratios.numel())
    total, count = host_value(reduce_sums(sums, model.run.world.device)["kl"], "divergence of single answers")
    return max(0.0, float(total / count))


def answered_by_next_rows(model: Model, reference: Reference, mini_batch: MiniBatch, layout: Layout) -> Sequence[Batch]:
    """Return prompts with the next row's answer and what the reference says of them; none where there is one row.

    All ranks call this together.
    """
    examples = {example.sample_id: example for batch in mini_batch.micro_batches for example in unpack(batch)}
    candidates = with_next_answers(examples, model.run.ranks, model.run.config.data.max_length)
    if len(candidates.sequences) < 2:
        return []
    batches = assemble(candidates, model.run.ranks, model.run.config.data, replace(layout, columns={}))
    return scored(model, reference, batches, "reference_logprobs").micro_batches


def with_next_answers(own_examples: dict[int, Example], ranks: Ranks, max_length: int) -> Candidates[Example]:
    """Give every prompt the answer of the next row, the last one that of the first; all ranks call this together.

    Args:
        own_examples: This rank's sequences by sample id.
        ranks: The group.
        max_length: Answers are cut where a sequence becomes longer.
    """
    owners = {
        sample_id: rank
        for rank, sample_ids in enumerate(ranks.gather(sorted(own_examples)))
        for sample_id in sample_ids
    }
    order = sorted(owners)
    before = dict(zip(order[1:] + order[:1], order, strict=True))
    outgoing: list[dict[int, Answer]] = [{} for _ in range(ranks.size)]
    for sample_id, example in own_examples.items():
        previous_id = before[sample_id]
        outgoing[owners[previous_id]][previous_id] = answer_of(example)
    answers: dict[int, Answer] = {}
    for received in ranks.swap(outgoing):
        answers |= received
    examples = {
        (sample_id, 0): with_answer(own_examples[sample_id], answer, max_length)
        for sample_id, answer in answers.items()
    }
    return Candidates(examples, sequence_facts(examples, ranks))


class Answer(NamedTuple):
    """The tokens that follow a prompt, with their loss mask."""

    tokens: NDArray[np.int64]
    """[L]"""
    loss_mask: NDArray[np.bool_]
    """[L]"""


def answer_of(example: Example) -> Answer:
    """Return a sequence from its first trained token on."""
    start = _answer_start(example)
    return Answer(example.tokens[start:], example.loss_mask[start:])


def with_answer(example: Example, answer: Answer, max_length: int) -> Example:
    """Return the prompt of a sequence, its images included, with another answer; cut where it becomes longer."""
    start = _answer_start(example)
    tokens = np.concatenate([example.tokens[:start], answer.tokens])[:max_length]
    loss_mask = np.concatenate([np.zeros(start, np.bool_), answer.loss_mask])[:max_length]
    positions = None if example.positions is None else going_on(example.positions[:, :start], tokens.size - start)
    return replace(example, tokens=tokens, loss_mask=loss_mask, positions=positions, per_token={})


def _answer_start(example: Example) -> int:
    return int(example.loss_mask.argmax())


def sequence_facts(examples: dict[tuple[int, int], Example], ranks: Ranks) -> list[SequenceInfo]:
    """Return what all ranks know of all ranks' sequences, by (draw, part) in order; all ranks call this together."""
    facts = [
        SequenceInfo(
            draw,
            index,
            example.tokens.size,
            example.trained_tokens,
            ranks.rank,
            has_inputs=bool(example.model_inputs),
        )
        for (draw, index), example in examples.items()
    ]
    return sorted(fact for rank_facts in ranks.gather(facts) for fact in rank_facts)


@dataclass(kw_only=True)
class PreferenceEvaluation(Evaluation):
    """A policy, its loss on preferences, and the reference policy."""

    takes_pairs: bool
    """Whether two answers to a prompt are compared, and not single ones judged."""
    layout: Layout
    """How its batches are packed."""
    reference: Reference | None
    """The frozen policy from the start of the run; None if the loss needs none, or if rows carry its precomputed
    log-probabilities."""


@dataclass(kw_only=True)
class PreferenceTraining(Training):
    """The parts of training on preferences."""

    evaluation: PreferenceEvaluation


def compared_with_reference(evaluation: PreferenceEvaluation, mini_batch: MiniBatch) -> MiniBatch:
    """Add the reference's log-probabilities, and for single answers the KL divergence; all ranks call this together."""
    model, layout, reference = evaluation.model, evaluation.layout, evaluation.reference
    if reference is None:
        return mini_batch
    with model.run.phase("reference"):
        result = scored(model, reference, mini_batch, "reference_logprobs")
    if evaluation.takes_pairs:
        return result
    with model.run.phase("divergence"):
        answered = answered_by_next_rows(model, reference, mini_batch, layout)
        return with_divergence(result, divergence(model, answered))


def with_divergence(mini_batch: MiniBatch, kl: float) -> MiniBatch:
    """Add z0 as a column to every token."""
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
    line = {name: value for name, value in metrics.items() if name not in _empty_means(metrics)}
    for name in list(line):
        side = name.removesuffix("rewards/chosen")
        if name != side and f"{side}rewards/rejected" in line and f"{side}rewards/margins" not in line:
            line[f"{side}rewards/margins"] = line[name] - line[f"{side}rewards/rejected"]
    return line


def _empty_means(metrics: dict[str, float]) -> set[str]:
    """Return the names of means over rejected answers if all are desirable, and over chosen ones if none is."""
    empty = {1.0: "rejected", 0.0: "chosen"}
    return {
        f"{name.removesuffix('kto/desirable')}{metric}/{empty[share]}"
        for name, share in metrics.items()
        if name.endswith("kto/desirable") and share in empty
        for metric in ("rewards", "logps")
    }
