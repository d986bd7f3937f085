"""KTO's z0: how far the policy is from its reference, on prompts with answers that belong to other rows.

Ethayarajh et al., "KTO" (arXiv:2402.01306), section 4: z0 = max(0, mean of log policy(y' | x) - log reference(y' | x)
over pairs (x, y') of the batch, y' an answer to another prompt), without a gradient. Here the batch is the whole
update, over all ranks: z0 is known before its first forward pass, so it does not depend on how that is split. Every
prompt is followed by the answer of the next row in draw order; where the reference was asked before the run, by that of
the row that `data/batches/other_answers.py` has chosen for good. Deviation: the authors' code takes z0 per micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from holdfast.data.batches.assembly import Layout, assemble
from holdfast.data.batches.candidates import Candidates, Known
from holdfast.data.batches.other_answers import Answer, answer_of, with_answer
from holdfast.data.batches.packing import to_device, unpack
from holdfast.data.batches.ranks import Ranks
from holdfast.models.heads.policy import without_dropout
from holdfast.objectives.answers import answers_of
from holdfast.objectives.base import ratio, scored_tokens
from holdfast.parallel.collectives import reduce_sums
from holdfast.training.run import ShardedModel
from holdfast.training.scorers.reference import Reference
from holdfast.training.scorers.scoring import scored
from holdfast.types import Batch, Example, MiniBatch, Scores


@torch.no_grad()
def divergence(sharded: ShardedModel, others: Sequence[Batch]) -> float:
    """Return z0 of an update in nats per answer, the same on every rank; all ranks call this together.

    Where the update has one row and the batch brings no other answer, z0 is 0.

    Args:
        sharded: The policy.
        others: The update's prompts with answers of other rows and what the reference says of them; as many batches on
            every rank.
    """
    if not others:
        return 0.0
    sums = {"kl": torch.zeros(2, dtype=torch.float64, device=sharded.setting.world.device)}
    with without_dropout(sharded.model):
        for other in others:
            batch = to_device(other, sharded.setting.world.device)
            scores = sharded.model(batch, temperature=sharded.temperature)
            assert isinstance(scores, Scores)
            answers = answers_of(scores.logprobs, scored_tokens(batch), compared=True)
            sums["kl"] += ratio(answers.log_ratios.sum(), answers.log_ratios.numel())
    total, count = reduce_sums(sums, sharded.setting.world.device)["kl"].tolist()
    return max(0.0, float(total / count))


def answered_by_next_rows(
    sharded: ShardedModel, reference: Reference, mini_batch: MiniBatch, layout: Layout
) -> Sequence[Batch]:
    """Return prompts with the next row's answer and what the reference says of them; none where there is one row.

    All ranks call this together.
    """
    examples = {example.sample_id: example for batch in mini_batch.micro_batches for example in unpack(batch)}
    candidates = with_next_answers(examples, sharded.setting.ranks, sharded.setting.config.data.max_length)
    if len(candidates.sequences) < 2:
        return []
    batches = assemble(candidates, sharded.setting.ranks, sharded.setting.config.data, replace(layout, columns={}))
    return scored(sharded, reference, batches, "reference_logprobs").micro_batches


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
        asked = before[sample_id]
        outgoing[owners[asked]][asked] = answer_of(example)
    answers: dict[int, Answer] = {}
    for received in ranks.swap(outgoing):
        answers |= received
    examples = {
        (sample_id, 0): with_answer(own_examples[sample_id], answer, max_length)
        for sample_id, answer in answers.items()
    }
    return Candidates(examples, known_of(examples, ranks))


def known_of(examples: dict[tuple[int, int], Example], ranks: Ranks) -> list[Known]:
    """Return what all ranks know of all ranks' sequences, by (draw, part) in order; all ranks call this together."""
    facts = [
        Known(
            draw,
            part,
            example.tokens.size,
            example.trained_tokens,
            ranks.rank,
            has_inputs=bool(example.model_inputs),
        )
        for (draw, part), example in examples.items()
    ]
    return sorted(fact for rank_facts in ranks.gather(facts) for fact in rank_facts)
