"""The loss of GRPO and its kin as their papers write it, from packed micro-batches of any split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.sections.data import Average
from holdfast.data.batches.assembly import shares
from holdfast.data.batches.packing import pack, split_tokens
from holdfast.objectives.base import scored_tokens
from holdfast.objectives.policy import PolicyGradient
from holdfast.objectives.surrogates import GSPO, Clip
from holdfast.types import Example
from tests.oracle.policy import clip_term

MAX_LENGTH = 40
Row = tuple[int, list[float]]
"""A completion: its prompt, and the surrogate of each trained token."""


@dataclass(frozen=True)
class Completion:
    """An example, and the log-probabilities that a policy would give its tokens."""

    example: Example
    logprobs: np.ndarray[Any, Any]


def draw(lengths: Sequence[int], trained: Sequence[int]) -> list[Completion]:
    """Draw completions of two prompts in turn; the last `trained` tokens of each are the policy's."""
    generator = np.random.default_rng(0)
    completions = []
    for index, (length, count) in enumerate(zip(lengths, trained, strict=True)):
        mask = np.arange(length) >= length - count
        logprobs = -generator.exponential(1.0, length)
        carried = {
            "advantages": np.full(length, generator.normal()),
            "sampler_logprobs": np.where(mask, logprobs, 0.0),
            "proximal_logprobs": logprobs + 0.3 * generator.normal(size=length),
        }
        example = Example(index, index % 2, np.arange(length), mask, per_token=carried)
        completions.append(Completion(example, logprobs))
    return completions


def surrogates(completions: Sequence[Completion]) -> list[Row]:
    """Return PPO's clipped surrogate of every trained token, one at a time."""
    rows = []
    for each in completions:
        carried, mask = each.example.per_token, each.example.loss_mask
        ratios = np.exp(each.logprobs - carried["proximal_logprobs"])[mask]
        terms = [clip_term(r, a, 0.2, 0.2, None)[0] for r, a in zip(ratios, carried["advantages"][mask], strict=True)]
        rows.append((each.example.prompt_id, terms))
    return rows


def grpo(rows: list[Row]) -> float:
    kept = [terms for _, terms in rows if terms]
    return sum(sum(terms) / len(terms) for terms in kept) / len(kept)


def dapo(rows: list[Row]) -> float:
    return sum(sum(terms) for _, terms in rows) / sum(len(terms) for _, terms in rows)


def dr_grpo(rows: list[Row]) -> float:
    kept = [terms for _, terms in rows if terms]
    return sum(sum(terms) for terms in kept) / MAX_LENGTH / len(kept)


def per_prompt(rows: list[Row]) -> float:
    prompts = sorted({prompt for prompt, terms in rows if terms})
    return sum(dapo([row for row in rows if row[0] == prompt]) for prompt in prompts) / len(prompts)


PAPERS: dict[Average, Callable[[list[Row]], float]] = {
    "sequence_mean": grpo,
    "token_mean": dapo,
    "constant_length": dr_grpo,
    "prompt_mean": per_prompt,
}
CASES = {
    "completions of all lengths": ((9, 14, 30, 7), (5, 10, 24, 1)),
    "one truncated and masked": ((9, 14, 30, 7), (5, 0, 24, 1)),
    "one empty": ((9, 2, 30, 7), (5, 0, 24, 1)),
    "a prompt with nothing to train": ((9, 14, 30, 7), (5, 0, 24, 0)),
}
SPLITS = {"whole": [[0, 1, 2, 3]], "one by one": [[0], [1], [2], [3]], "uneven": [[3, 0, 2], [1]]}


def loss_of(
    objective: PolicyGradient, completions: list[Completion], average: Average, split: list[list[int]]
) -> float:
    """Sum micro-batches and divide once, as a training step does."""
    examples = [each.example for each in completions]
    all_shares = shares(average, [e.trained_tokens for e in examples], [e.prompt_id for e in examples], MAX_LENGTH)
    total, count = 0.0, 0.0
    for places in split:
        batch = pack(
            [examples[place] for place in places], [all_shares[place] for place in places], dtype=torch.float64
        )
        by_place = torch.zeros_like(batch.weights)
        for place, view in zip(places, split_tokens(batch, by_place), strict=True):
            view.copy_(torch.tensor(completions[place].logprobs))
        tokens = scored_tokens(batch)
        terms = objective.token_terms(by_place.flatten()[batch.scored], None, tokens)
        total += float((terms * tokens.weights).sum())
        count += batch.count
    return total / count


@pytest.mark.parametrize("average", PAPERS)
@pytest.mark.parametrize(("lengths", "trained"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_the_loss_is_that_of_the_paper_for_every_split(
    average: Average, lengths: Sequence[int], trained: Sequence[int], split: list[list[int]]
) -> None:
    completions = draw(lengths, trained)

    found = loss_of(PolicyGradient(Clip()), completions, average, split)

    assert found == pytest.approx(PAPERS[average](surrogates(completions)), rel=1e-9)


def test_a_mean_over_tokens_and_a_mean_over_prompts_are_two_things() -> None:
    rows = surrogates(draw(*CASES["completions of all lengths"]))

    assert dapo(rows) != pytest.approx(per_prompt(rows), rel=1e-2)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_gspo_is_the_mean_over_sequences_of_one_term_each(split: list[list[int]]) -> None:
    completions = draw(*CASES["completions of all lengths"])
    terms = []
    for each in completions:
        carried, mask = each.example.per_token, each.example.loss_mask
        ratio = np.exp(np.mean((each.logprobs - carried["proximal_logprobs"])[mask]))
        terms.append(clip_term(float(ratio), carried["advantages"][0], 0.06, 0.09, None)[0])

    found = loss_of(PolicyGradient(GSPO(0.06, 0.09)), completions, "sequence_mean", split)

    assert found == pytest.approx(np.mean(terms), rel=1e-9)
