"""Inputs that only the model understands travel with their sequences, and positions may have several axes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from holdfast.config.sections.data import DataConfig
from holdfast.data.batches.assembly import Layout, assemble
from holdfast.data.batches.candidates import Candidates, SequenceInfo
from holdfast.data.batches.packing import CommonStart, Share, pack, unpack
from holdfast.types import Example
from tests.batching.streams import Alone

ONE = Share(1.0, 1.0)
TURNED = np.array([[0, 1, 1, 3], [0, 1, 2, 3], [0, 1, 1, 3]])


def sequence(sample_id: int, length: int, rows: int = 0, **changes: Any) -> Example:
    tokens = np.arange(length) + 10 * sample_id
    inputs = {} if not rows else {"patches": np.full((rows, 2), float(sample_id)), "grid": np.array([[1, rows, 1]])}
    return replace(Example(sample_id, sample_id, tokens, np.arange(length) > 1, "rows"), model_inputs=inputs, **changes)


MIXED = [sequence(1, 3), sequence(2, 4, 3, positions=TURNED), sequence(3, 2), sequence(4, 5, 1)]


@pytest.mark.parametrize("padded", [False, True])
def test_what_is_packed_comes_back_as_it_was(padded: bool) -> None:
    found = unpack(pack(MIXED, [ONE] * 4, padded=padded))

    for example, before in zip(found, MIXED, strict=True):
        assert example.tokens.tolist() == before.tokens.tolist()
        assert example.model_inputs.keys() == before.model_inputs.keys()
        for name, values in before.model_inputs.items():
            np.testing.assert_array_equal(example.model_inputs[name], values)
        assert (example.positions is None) == (before.positions is None)
    np.testing.assert_array_equal(found[1].positions, TURNED)


def test_inputs_are_joined_in_the_order_of_the_sequences_and_say_whose_they_are() -> None:
    batch = pack(MIXED, [ONE] * 4)

    assert batch.model_inputs["patches"].tolist() == [[2.0, 2.0]] * 3 + [[4.0, 4.0]]
    assert batch.model_inputs["grid"].tolist() == [[1, 3, 1], [1, 1, 1]]
    assert batch.model_input_rows == {"patches": (0, 3, 0, 1), "grid": (0, 1, 0, 1)}
    assert not batch.stands_in


@pytest.mark.parametrize("padded", [False, True])
def test_text_beside_turned_positions_has_the_same_number_on_every_axis(padded: bool) -> None:
    batch = pack(MIXED[:2], [ONE] * 2, padded=padded)

    text = [0, 1, 2, *([0] if padded else [])]  # padding counts on its own
    turned = TURNED.tolist()
    rows = [[text, axis] for axis in turned] if padded else [[[*text, *axis]] for axis in turned]
    assert batch.position_ids.tolist() == rows


def test_inputs_of_other_shapes_are_refused_rather_than_joined() -> None:
    wider = replace(MIXED[3], model_inputs={"patches": np.zeros((1, 3)), "grid": np.array([[1, 1, 1]])})

    with pytest.raises(ValueError, match=r"sample 4 has 1 rows of patches of float64\[3\], sample 2 has float64\[2\]"):
        pack([MIXED[1], wider], [ONE] * 2)


def test_inputs_of_a_shared_head_are_joined_once_and_given_back_to_all() -> None:
    with_inputs = next(example for example in MIXED if example.positions is not None)
    assert with_inputs.positions is not None
    longer = replace(
        with_inputs,
        sample_id=5,
        tokens=np.append(with_inputs.tokens, 7),
        loss_mask=np.append(with_inputs.loss_mask, True),
        positions=np.concatenate([with_inputs.positions, np.full((3, 1), 40)], axis=1),
    )
    examples = [MIXED[0], with_inputs, longer, MIXED[3]]

    batch = pack(examples, [ONE] * 4, heads=[CommonStart(1, 0), CommonStart(2, 1), CommonStart(1, 0)])

    assert [rows[1] for rows in batch.model_input_rows.values()] == [
        len(v) for _, v in sorted(with_inputs.model_inputs.items())
    ]
    assert all(rows[2] == 0 for rows in batch.model_input_rows.values())
    for found, example in zip(unpack(batch), examples, strict=True):
        assert found.tokens.tolist() == example.tokens.tolist()
        assert found.model_inputs.keys() == example.model_inputs.keys()
        for name, values in example.model_inputs.items():
            np.testing.assert_array_equal(found.model_inputs[name], values)
        if example.positions is not None:
            np.testing.assert_array_equal(found.positions, example.positions)


def test_a_head_with_other_inputs_or_positions_is_refused() -> None:
    first = MIXED[1]
    others = {name: values + 1 for name, values in first.model_inputs.items()}
    assert first.positions is not None

    for changed in ({"model_inputs": others}, {"model_inputs": {}}, {"positions": first.positions + 1}):
        with pytest.raises(ValueError, match=r"sample 5: .* not those of sample 2, and so they cannot share a head"):
            pack([first, replace(first, sample_id=5, **changed)], [ONE] * 2, heads=[CommonStart(2, 1)])


def test_neighbours_with_a_shared_head_take_a_stand_in_too() -> None:
    alike = [MIXED[0], replace(MIXED[0], sample_id=5)]

    batch = pack(alike, [ONE] * 2, heads=[CommonStart(2, 1)], stand_in={"patches": np.zeros((1, 2))})

    assert batch.stands_in


class OneOfTwo(Alone):
    """A rank that has read all rows itself."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def swap(self, outgoing: Any) -> Any:
        return [outgoing[self.rank]]


def passes_of(ranks: Any) -> list[tuple[list[int], bool, bool]]:
    """Return (sample ids, whether there are model inputs, whether they stand in) of a rank's forward passes."""
    examples = [sequence(index, 8, rows=2 * (index == 0)) for index in range(4)]
    found = Candidates[Example](
        {(index, 0): example for index, example in enumerate(examples)},
        [
            SequenceInfo(index, 0, 8, 6, ranks.rank, 0, bool(example.model_inputs))
            for index, example in enumerate(examples)
        ],
    )
    config = DataConfig(path="rows", max_length=8, tokens_per_micro_batch=8)
    layout = Layout(stand_in={"patches": np.zeros((1, 2)), "grid": np.array([[1, 1, 1]])})
    batches = assemble(found, ranks, config, layout).micro_batches
    return [(list(batch.sample_ids), bool(batch.model_inputs), batch.stands_in) for batch in batches]


def test_a_rank_without_inputs_takes_the_stand_in_only_where_another_rank_has_some() -> None:
    first, second = (passes_of(OneOfTwo(rank)) for rank in (0, 1))

    together = [sorted(pair) for pair in zip(first, second, strict=True)]
    assert sorted(sample for pair in together for samples, *_ in pair for sample in samples) == [0, 1, 2, 3]
    with_images = [pair for pair in together if pair[0][0] == [0]]
    assert [[flags for _, *flags in pair] for pair in with_images] == [[[True, False], [True, True]]]
    others = [pair for pair in together if pair not in with_images]
    assert [[flags for _, *flags in pair] for pair in others] == [[[False, False], [False, False]]]


def test_alone_nothing_stands_in() -> None:
    assert [flags for samples, *flags in sorted(passes_of(Alone()))] == [[True, False]] + [[False, False]] * 3
