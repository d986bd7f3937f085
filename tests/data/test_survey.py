"""What all rows come to, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.data.survey import Survey
from holdfast.data.tokens.chat import Tokenised
from holdfast.types import Example


def surveyed(lengths: list[int], tokens: list[int]) -> Survey:
    survey = Survey("rows", 100)
    for length, token in zip(lengths, tokens, strict=True):
        example = Example(0, 0, np.full(length, token, dtype=np.int64), np.ones(length, dtype=np.bool_))
        survey.add(Tokenised((example,), {}, lengths=(length,)))
    return survey


@pytest.mark.parametrize("seed", range(5))
def test_lengths_and_their_histogram_are_those_of_numpy(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, [2, 12, 13, 150, 400][seed], 300)

    survey = surveyed(lengths.tolist(), [0] * 300)

    assert (survey.longest, survey.measured) == (lengths.max(), 300)
    for share in (0.5, 0.9, 0.99, 1.0):
        assert survey.quantile(share) == np.quantile(lengths, share, method="inverted_cdf")
    bars = survey.histogram()
    assert len(bars) <= 12
    assert [number for *_, number in bars] == [((lengths >= low) & (lengths <= high)).sum() for low, high, _ in bars]
    assert sum(number for *_, number in bars) == 300


def test_rows_that_say_the_same_are_counted_once_each() -> None:
    survey = surveyed([3, 3, 4, 3, 3], [7, 7, 7, 8, 7])

    assert survey.duplicates == 2


def test_nothing_has_no_lengths() -> None:
    survey = Survey("rows", 100)

    assert (survey.longest, survey.quantile(0.5), survey.histogram(), survey.length_for(1.0)) == (0, 0, [], 64)
    assert survey.duplicates == 0
