"""Sequences side by side, and apart again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data.batches.packing import Share, pack, places, split_tokens, to_device, unpack
from holdfast.types import Example
from tests.batching.examples import assert_same_examples, example, packs

ONE = Share(1.0, 1.0)
FIRST = example(1, [False, True, False, True])
SECOND = example(2, [False, True])


def test_a_pack_by_hand() -> None:
    batch = pack([FIRST, SECOND], [Share(0.5, 2.0), Share(0.25, 1.0)])

    assert batch.tokens.tolist() == [[100, 101, 102, 103, 200, 201]]
    assert batch.position_ids.tolist() == [[[0, 1, 2, 3, 0, 1]]]
    assert batch.sequence_ids.tolist() == [[0, 0, 0, 0, 1, 1]]
    assert batch.predictor_index.tolist() == [[-1, 0, 1, 2, -1, 4]]
    assert batch.loss_mask.tolist() == [[False, True, False, True, False, True]]
    assert batch.weights.tolist() == [[0.0, 0.5, 0.0, 0.5, 0.0, 0.25]]
    assert batch.scored.tolist() == [1, 3, 5]
    assert batch.lengths == ((4, 2),)
    assert batch.sample_ids == (1, 2)
    assert batch.count == 3.0
    assert not batch.is_padded


def test_padded_rows_by_hand() -> None:
    batch = pack([FIRST, SECOND], [ONE, ONE], padded=True, pad_token=9)

    assert batch.tokens.tolist() == [[100, 101, 102, 103], [200, 201, 9, 9]]
    assert batch.position_ids.tolist() == [[[0, 1, 2, 3], [0, 1, 0, 0]]]
    assert batch.sequence_ids.tolist() == [[0, 0, 0, 0], [1, 1, -1, -1]]
    assert batch.predictor_index.tolist() == [[-1, 0, 1, 2], [-1, 0, -1, -1]]
    assert batch.loss_mask.tolist() == [[False, True, False, True], [False, True, False, False]]
    assert batch.scored.tolist() == [1, 3, 5]
    assert batch.lengths == ((4,), (2, 2))
    assert batch.is_padded


@pytest.mark.parametrize("padded", [False, True])
def test_no_sequence_is_one_untrained_token(padded: bool) -> None:
    batch = pack([], [], padded=padded, pad_token=5)

    assert batch.tokens.tolist() == [[5]]
    assert batch.sequence_ids.tolist() == [[-1]]
    assert batch.predictor_index.tolist() == [[-1]]
    assert batch.weights.tolist() == [[0.0]]
    assert batch.scored.numel() == 0
    assert batch.lengths == ((1,),)
    assert batch.count == 0.0
    assert unpack(batch) == []


@given(packs(), st.booleans())
def test_unpack_is_the_exact_inverse_of_pack(examples: list[Example], padded: bool) -> None:
    batch = pack(examples, [ONE] * len(examples), padded=padded)

    assert_same_examples(unpack(batch), examples)


@given(packs(most=4), st.booleans())
def test_a_token_is_predicted_by_the_one_before_it_in_its_sequence_and_by_no_other(
    examples: list[Example], padded: bool
) -> None:
    batch = pack(examples, [ONE] * len(examples), padded=padded)

    for row in range(batch.tokens.shape[0]):
        for place, predictor in enumerate(batch.predictor_index[row].tolist()):
            sequence, position = batch.sequence_ids[row, place], batch.position_ids[0, row, place]
            if sequence == -1 or position == 0:
                assert predictor == -1
            else:
                assert predictor == place - 1
                assert batch.sequence_ids[row, predictor] == sequence
    for place in batch.scored.tolist():
        assert batch.predictor_index.flatten()[place] >= 0


@given(packs(), st.booleans())
def test_the_mask_says_what_is_trained_and_the_weights_how_it_counts(examples: list[Example], padded: bool) -> None:
    shares = [Share(0.5 + index, 2.0 * index) for index in range(len(examples))]

    batch = pack(examples, shares, padded=padded, dtype=torch.float64)

    assert batch.count == sum(share.count for share in shares)
    assert batch.weights.dtype == torch.float64
    assert torch.equal(batch.scored, batch.loss_mask.flatten().nonzero().squeeze(1))
    for weights, each, share in zip(split_tokens(batch, batch.weights), examples, shares, strict=True):
        np.testing.assert_array_equal(weights.numpy(), np.where(each.loss_mask, share.weight, 0.0))
    assert batch.weights.sum() == pytest.approx(
        sum(share.weight * each.trained_tokens for share, each in zip(shares, examples, strict=True))
    )


@given(packs(), st.booleans())
def test_documents_cover_every_row_from_left_to_right(examples: list[Example], padded: bool) -> None:
    batch = pack(examples, [ONE] * len(examples), padded=padded)

    assert [sum(lengths) for lengths in batch.lengths] == [batch.tokens.shape[1]] * batch.tokens.shape[0]
    for (row, place), each in zip(places(batch), examples, strict=True):
        assert batch.tokens[row, place].tolist() == each.tokens.tolist()


def test_a_trained_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 3: the first token cannot be trained, nothing predicts it"):
        pack([FIRST, example(3, [True, True])], [ONE, ONE])


def test_numbers_of_another_kind_are_refused_rather_than_cast() -> None:
    carried = replace(FIRST, per_token={"values": np.zeros(4, dtype=np.float32)})
    longer = replace(SECOND, per_token={"values": np.zeros(2, dtype=np.float64)})
    wider = replace(SECOND, per_token={"values": np.zeros((2, 3), dtype=np.float32)})

    for other in (SECOND, longer, wider):
        with pytest.raises(
            ValueError, match=r"sample 2 carries \{.*\} per token, sample 1 carries \{'values': 'float32"
        ):
            pack([carried, other], [ONE, ONE])


def test_numbers_may_be_called_like_a_column() -> None:
    named = replace(SECOND, per_token={"weights": np.array([7, 8])})

    batch = pack([named], [ONE])

    assert batch.per_token["weights"].tolist() == [[7, 8]]
    assert batch.weights.tolist() == [[0.0, 1.0]]


def test_a_batch_moves_with_all_it_carries() -> None:
    carried = replace(FIRST, per_token={"values": np.zeros(4, dtype=np.float32)})

    moved = to_device(pack([carried], [ONE]), torch.device("meta"))

    assert moved.tokens.device.type == moved.scored.device.type == moved.per_token["values"].device.type == "meta"
    assert moved.lengths == ((4,),)
