"""Four averages as a weight per token and a count per sequence, against NumPy by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data.batches.assembly import shares
from holdfast.data.batches.packing import Share


def average_of(average: Any, losses: list[list[float]], prompts: list[int], longest: int) -> float:
    """Average the losses of the trained tokens of each sequence as `shares` says."""
    found = shares(average, [len(sequence) for sequence in losses], prompts, longest)
    total = sum(share.weight * sum(sequence) for share, sequence in zip(found, losses, strict=True))
    return total / sum(share.count for share in found)


def by_hand(average: str, losses: list[list[float]], prompts: list[int], longest: int) -> float:
    trained = [sequence for sequence in losses if sequence]
    match average:
        case "token_mean":
            return float(np.mean(np.concatenate([np.asarray(sequence) for sequence in trained])))
        case "sequence_mean":
            return float(np.mean([np.mean(sequence) for sequence in trained]))
        case "constant_length":
            return float(np.mean([np.sum(sequence) / longest for sequence in trained]))
    of_prompt = [
        [loss for sequence, owner in zip(losses, prompts, strict=True) if owner == prompt for loss in sequence]
        for prompt in sorted(set(prompts))
    ]
    return float(np.mean([np.mean(pooled) for pooled in of_prompt if pooled]))


LOSSES = [[1.0, 2.0, 6.0], [], [4.0], [5.0, 7.0], []]
PROMPTS = [7, 7, 8, 8, 9]


@pytest.mark.parametrize(
    ("average", "value"),
    [
        ("token_mean", 25 / 6),
        ("sequence_mean", (3 + 4 + 6) / 3),
        ("constant_length", (9 + 4 + 12) / 10 / 3),
        ("prompt_mean", (3 + 16 / 3) / 2),
    ],
)
def test_an_average_is_the_one_done_by_hand(average: str, value: float) -> None:
    assert average_of(average, LOSSES, PROMPTS, 10) == pytest.approx(value, rel=1e-15)


SEQUENCES = st.lists(
    st.tuples(st.lists(st.floats(0, 10), max_size=5), st.integers(0, 3)), min_size=1, max_size=8
).filter(lambda drawn: any(losses for losses, _ in drawn))


@given(st.sampled_from(["token_mean", "sequence_mean", "constant_length", "prompt_mean"]), SEQUENCES)
def test_any_average_of_any_sequences_is_the_one_done_by_hand(average: str, drawn: Any) -> None:
    losses, prompts = [losses for losses, _ in drawn], [prompt for _, prompt in drawn]

    assert average_of(average, losses, prompts, 7) == pytest.approx(by_hand(average, losses, prompts, 7), rel=1e-12)


@pytest.mark.parametrize("average", ["token_mean", "sequence_mean", "constant_length", "prompt_mean"])
def test_a_fully_masked_sequence_weighs_nothing_and_counts_nothing(average: Any) -> None:
    found = shares(average, [3, 0, 2], [1, 1, 2], 8)

    assert found[1] == Share(0.0, 0.0)
    assert all(share.weight > 0 and share.count > 0 for share in (found[0], found[2]))


def test_an_update_without_a_trained_token_counts_nothing() -> None:
    assert shares("prompt_mean", [0, 0], [1, 1], 8) == [Share(0.0, 0.0)] * 2
    assert shares("token_mean", [], [], 8) == []


def test_the_counts_of_a_prompt_sum_to_one() -> None:
    found = shares("prompt_mean", [3, 0, 5, 2], [4, 4, 4, 9], 8)

    assert sum(share.count for share in found[:3]) == pytest.approx(1.0, rel=1e-15)
    assert found[3] == Share(0.5, 1.0)


def test_constant_length_divides_by_the_same_number_whatever_else_is_in_the_update() -> None:
    alone, together = shares("constant_length", [3], [0], 16), shares("constant_length", [3, 9, 1], [0, 1, 2], 16)

    assert alone[0] == together[0] == Share(1 / 16, 1.0)
