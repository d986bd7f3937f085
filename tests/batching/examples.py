"""Sequences made by hand or by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from holdfast.types import Example


def example(sample_id: int, trained: Sequence[bool], *, prompt_id: int | None = None, **more: Any) -> Example:
    """Return a sequence whose tokens say where they stand: 100 * sample + position."""
    return Example(
        sample_id=sample_id,
        prompt_id=sample_id if prompt_id is None else prompt_id,
        tokens=np.arange(len(trained)) + 100 * sample_id,
        loss_mask=np.asarray(trained, dtype=np.bool_),
        **more,
    )


@st.composite
def packs(draw: st.DrawFn, *, most: int = 6) -> list[Example]:
    """Draw the sequences of one pack, with numbers carried per token."""
    examples = []
    for index in range(draw(st.integers(0, most))):
        length = draw(st.integers(1, 9))
        trained = draw(arrays.arrays(np.bool_, length))
        trained[0] = False
        examples.append(
            Example(
                sample_id=draw(st.integers(0, 2**40)),
                prompt_id=draw(st.integers(0, 3)),
                tokens=draw(arrays.arrays(np.int64, length, elements=st.integers(0, 2**17))),
                loss_mask=trained,
                source=f"source {index % 2}",
                per_token={
                    "logprobs": draw(arrays.arrays(np.float32, length, elements=st.floats(-9, 0, width=32))),
                    "experts": draw(arrays.arrays(np.int16, (length, 2), elements=st.integers(0, 7))),
                },
            )
        )
    return examples


def assert_same_examples(found: Sequence[Example], expected: Sequence[Example]) -> None:
    """Compare sequences down to the dtype of every array."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.sample_id, ours.prompt_id, ours.source) == (theirs.sample_id, theirs.prompt_id, theirs.source)
        pairs = [(ours.tokens, theirs.tokens), (ours.loss_mask, theirs.loss_mask)]
        assert set(ours.per_token) == set(theirs.per_token)
        pairs += [(ours.per_token[name], theirs.per_token[name]) for name in theirs.per_token]
        for left, right in pairs:
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right)
