"""Several sources, and sources that end nobody knows where."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.batching.sources import indexed, streamed
from tests.batching.streams import serve, stream


def test_sources_without_weights_give_every_row_once_per_epoch() -> None:
    found = stream(indexed(7, "a"), indexed(5, "b"), shuffle=True)

    batches = [found.next(step) for step in range(3)]

    drawn = [
        (source, tokens // 1000)
        for batch in batches
        if batch is not None
        for micro_batch in batch.micro_batches
        for source, tokens in zip(micro_batch.sources, first_tokens(micro_batch), strict=True)
    ]
    assert sorted(drawn) == [("a", row) for row in range(7)] + [("b", row) for row in range(5)]


def first_tokens(micro_batch: Any) -> list[int]:
    starts = np.cumsum([0, *micro_batch.lengths[0]])[:-1]
    return micro_batch.tokens[0, starts].tolist()  # type: ignore[no-any-return]


def test_a_short_stream_starts_again_without_taking_the_long_one_back() -> None:
    """The end of one stream is not the end of the mixture: the rows of the other that come later are seen too."""
    found = stream(streamed(5, "short"), streamed(200, "long"), weights=[1.0, 1.0], batch_size=8)

    taken: dict[str, list[int]] = {"short": [], "long": []}
    for step in range(30):
        batch = found.next(step)
        assert batch is not None
        assert batch.samples == 8
        for micro_batch in batch.micro_batches:
            for source, token in zip(micro_batch.sources, first_tokens(micro_batch), strict=True):
                taken[source].append(token // 1000)

    assert sorted(taken["long"]) == list(range(120))
    assert Counter(taken["short"]) == dict.fromkeys(range(5), 24)


def test_a_mixture_of_streams_has_an_epoch_once_all_lengths_are_known() -> None:
    found = stream(streamed(4, "a"), streamed(6, "b"), weights=[1.0, 1.0], batch_size=2)

    epochs = [found.next(step) and found.epoch for step in range(12)]

    # Draws alternate, so the end of b is met at draw 13: more draws than both have rows, and the epoch ends there.
    assert epochs == pytest.approx([0.0] * 6 + [1.0, 1.2, 1.4, 1.6, 1.8, 2.0])


def test_a_stream_is_shuffled_anew_in_every_pass() -> None:
    found = stream(streamed(10), shuffle=True, shuffle_buffer=5, batch_size=5)

    batches = serve(found, 4)

    assert [sorted(batch) for batch in batches] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]] * 2
    assert batches[:2] != batches[2:]
