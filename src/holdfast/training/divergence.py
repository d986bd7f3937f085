"""KTO's z0: how far the policy is from its reference, on prompts with answers that belong to other rows.

Ethayarajh et al., "KTO" (arXiv:2402.01306), section 4: z0 = max(0, mean of log policy(y' | x) - log reference(y' | x)
over mismatched pairs (x, y') of the batch), without a gradient. Here the batch is the whole update, over all ranks:
every prompt is followed by the answer of the next row in draw order, and z0 is known before the first forward pass of
the update, so it does not depend on how that is split. Deviation: the authors' code takes it per micro-batch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.data.assembly import Layout, assemble
from holdfast.data.candidates import Candidates, Known
from holdfast.data.exchange import Exchange
from holdfast.data.packing import unpack
from holdfast.data.vision import going_on
from holdfast.objectives.answers import answers_of
from holdfast.objectives.base import ratio, scored_tokens
from holdfast.parallel.collectives import reduce_sums
from holdfast.training.reference import Reference
from holdfast.training.run import Evaluation
from holdfast.training.scoring import scored
from holdfast.types import Example, MiniBatch, Scores

Answer = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Tokens and loss mask."""


@torch.no_grad()
def divergence(run: Evaluation, reference: Reference, mini_batch: MiniBatch, layout: Layout) -> float:
    """Return z0 of an update in nats per answer, the same on every rank; all ranks call this together.

    With a single row there is no other answer, and z0 is 0.
    """
    mine = {example.sample_id: example for batch in mini_batch.micro_batches for example in unpack(batch)}
    mismatched = mismatch(mine, run.exchange, run.config.data.max_length)
    if len(mismatched.known) < 2:
        return 0.0
    batches = assemble(mismatched, run.exchange, run.config.data, replace(layout, columns={}))
    was_training = run.policy.training
    run.policy.eval()
    sums = {"kl": torch.zeros(2, dtype=torch.float64, device=run.world.device)}
    for batch in scored(run, reference, batches, "reference_logprobs").micro_batches:
        scores = run.policy(batch, temperature=run.temperature)
        assert isinstance(scores, Scores)
        answers = answers_of(scores.logprobs, scored_tokens(batch), compared=True)
        sums["kl"] += ratio(answers.log_ratios.sum(), answers.log_ratios.numel())
    run.policy.train(was_training)
    total, count = reduce_sums(sums, run.world.device)["kl"].tolist()
    return max(0.0, float(total / count))


def mismatch(mine: dict[int, Example], exchange: Exchange, max_length: int) -> Candidates[Example]:
    """Give every prompt the answer of the next row, the last one that of the first; all ranks call this together.

    Args:
        mine: This rank's sequences by sample id.
        exchange: The ranks.
        max_length: Answers are cut where a sequence becomes longer.
    """
    owners = {sample_id: rank for rank, told in enumerate(exchange.gather(sorted(mine))) for sample_id in told}
    order = sorted(owners)
    before = dict(zip(order[1:] + order[:1], order, strict=True))
    outgoing: list[dict[int, Answer]] = [{} for _ in range(exchange.size)]
    for sample_id, example in mine.items():
        start = _answer_start(example)
        asked = before[sample_id]
        outgoing[owners[asked]][asked] = (example.tokens[start:], example.loss_mask[start:])
    answers: dict[int, Answer] = {}
    for received in exchange.swap(outgoing):
        answers |= received
    examples = {(sample_id, 0): _joined(mine[sample_id], answer, max_length) for sample_id, answer in answers.items()}
    return Candidates(examples, known_of(examples, exchange))


def _answer_start(example: Example) -> int:
    return int(example.loss_mask.argmax())


def _joined(asked: Example, answer: Answer, max_length: int) -> Example:
    start = _answer_start(asked)
    tokens = np.concatenate([asked.tokens[:start], answer[0]])[:max_length]
    loss_mask = np.concatenate([np.zeros(start, np.bool_), answer[1]])[:max_length]
    positions = None if asked.positions is None else going_on(asked.positions[:, :start], tokens.size - start)
    return Example(
        asked.sample_id,
        asked.prompt_id,
        tokens,
        loss_mask,
        asked.source,
        model_inputs=asked.model_inputs,
        positions=positions,
    )


def known_of(examples: dict[tuple[int, int], Example], exchange: Exchange) -> list[Known]:
    """Return what all ranks know of all ranks' sequences, by (draw, part) in order; all ranks call this together."""
    facts = [
        Known(
            draw,
            part,
            example.tokens.size,
            example.trained_tokens,
            exchange.rank,
            has_inputs=bool(example.model_inputs),
        )
        for (draw, part), example in examples.items()
    ]
    return sorted(fact for told in exchange.gather(facts) for fact in told)
