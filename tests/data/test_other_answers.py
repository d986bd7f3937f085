"""Whose answer a prompt is given for good: a function of the rows of its source, whatever orders them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.verbs.dpo import PairDataConfig
from holdfast.data.batches.other_answers import OtherAnswerTokeniser
from holdfast.data.rows.reading import DrawOrder, HeldOut, RowReader, stride
from holdfast.data.rows.rows import Row, Source, from_rows
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.data.tokens.preferences import LabelTokeniser
from holdfast.errors import DataError


def rows_of(*pairs: str, name: str = "rows") -> Source:
    """Return a source of labelled rows, each written as prompt=completion."""
    rows = [dict(zip(("prompt", "completion"), pair.split("="), strict=True)) for pair in pairs]
    return from_rows(
        [{"prompt": f"{row['prompt']}=", "completion": row["completion"], "label": True} for row in rows], name
    )


def numbered(count: int, name: str = "rows") -> Source:
    return rows_of(*(f"ask {name} {number}={number}" for number in range(count)), name=name)


def with_others(
    sources: Sequence[Source], order: DrawOrder, accept: Callable[[Row], bool] | None = None, **options: Any
) -> Callable[[int], list[str]]:
    """Return a function from a draw to the texts of its sequences."""
    config = PairDataConfig(path="rows", **({"max_length": 64} | options))
    plain = LabelTokeniser(RowTokeniser(character_tokenizer(), config, Path.cwd()), config)
    reader = RowReader(sources, order)
    tokenise = OtherAnswerTokeniser(plain, reader, accept, config.max_length)

    def texts(draw: int) -> list[str]:
        source, name, row = reader.read(draw)
        found = tokenise(row, draw, source.name, name).examples
        return [character_tokenizer().decode(example.tokens.tolist()) for example in found]

    return texts


def in_order(source: Source) -> DrawOrder:
    return DrawOrder([source.size], shuffle=False)


@pytest.mark.parametrize("rows", [2, 3, 4, 6, 10, 12, 97, 1000, 4096, 65537])
def test_a_stride_meets_every_row_once(rows: int) -> None:
    step = stride(rows)

    assert len({turn * step % rows for turn in range(rows)}) == rows


def test_the_answer_lies_0_618_of_the_rows_on() -> None:
    source = numbered(12)
    texts = with_others([source], in_order(source))

    assert [texts(draw)[1] for draw in range(12)] == [f"ask rows {row}={(row + 7) % 12}<eos>" for row in range(12)]


def test_it_is_the_same_in_every_order_pass_and_mixture() -> None:
    sources = [numbered(12, "one"), numbered(5, "two")]
    alone = {}
    for source in sources:
        texts = with_others([source], in_order(source))
        alone |= dict(texts(draw) for draw in range(source.size or 0))

    for order in (
        DrawOrder([12, 5], seed=3),
        DrawOrder([12, 5], [0.3, 0.7], seed=4),
        DrawOrder([12, 5], shuffle=False),
    ):
        texts = with_others(sources, order)
        for draw in range(60):
            own, other = texts(draw)
            assert alone[own] == other


def test_rows_that_ask_the_same_or_are_left_out_are_passed_over() -> None:
    """Of six rows, those 5, 10, 15, 20 and 25 on are looked at: of row 0 that is 5, 4, 3, 2 and 1."""
    source = rows_of("same=a", "other=b", "long prompt=c", "no=d", "empty=", "same=e")
    options = {"unusable": "drop", "overlong": "drop", "max_length": 10}
    texts = with_others([source], in_order(source), lambda row: row["prompt"] != "no=", **options)

    found = {draw: texts(draw) for draw in (0, 1, 2, 4, 5)}

    assert found == {
        0: ["same=a<eos>", "same=b<eos>"],
        1: ["other=b<eos>", "other=a<eos>"],
        2: [],
        4: [],
        5: ["same=e<eos>", "same=b<eos>"],
    }


def test_a_longer_answer_is_cut_and_columns_are_those_of_the_row() -> None:
    source = rows_of("a long prompt=x", "b=0123456789")
    config = PairDataConfig(path="rows", max_length=16)
    plain = LabelTokeniser(RowTokeniser(character_tokenizer(), config, Path.cwd()), config)
    tokenise = OtherAnswerTokeniser(plain, RowReader([source], in_order(source)), None, 16)

    own, other = tokenise(source.row(0), 0, "rows", "row").examples

    assert character_tokenizer().decode(other.tokens.tolist()) == "a long prompt=01"
    assert other.loss_mask.tolist() == [False] * 14 + [True] * 2
    assert (own.sample_id, own.prompt_id, own.source) == (other.sample_id, other.prompt_id, other.source)
    assert {name: values.dtype for name, values in own.per_token.items()} == {
        name: values.dtype for name, values in other.per_token.items()
    }
    assert other.per_token["desirable"].size == other.tokens.size


def test_a_validation_split_keeps_to_itself() -> None:
    source = numbered(40)
    for keep in (True, False):
        split = HeldOut(source, 0.3, keep=keep)
        numbers = {str(split.number(index)) for index in range(split.size or 0)}
        texts = with_others([split], in_order(split))

        answers = {texts(draw)[1].partition("=")[2].removesuffix("<eos>") for draw in range(split.size or 0)}

        assert answers == numbers


@pytest.mark.parametrize(
    ("source", "accept"),
    [
        (rows_of("same=a", "same=b", "same=c"), None),
        (numbered(5), lambda row: row["completion"] == "0"),
        (numbered(1), None),
    ],
    ids=["one prompt", "a filter that takes one row", "one row"],
)
def test_where_no_other_row_asks_something_else_the_row_is_refused(source: Source, accept: Any) -> None:
    texts = with_others([source], in_order(source), accept)

    with pytest.raises(DataError) as caught:
        texts(0)

    assert str(caught.value).startswith("rows row 0: with reference.precompute, kto puts the answer of another row of")
    assert "Add such rows, or leave reference.precompute out." in str(caught.value)


def asking_otherwise_after(turns: int) -> Callable[[int], list[str]]:
    """Return texts of 1500 rows that ask the same, but for the one that row 0 looks at as the turns-th."""
    pairs = [f"same={number}" for number in range(1500)]
    pairs[turns * stride(1500) % 1500] = "other=b"
    source = rows_of(*pairs)
    return with_others([source], in_order(source))


def test_the_thousandth_row_that_is_looked_at_will_do() -> None:
    texts = asking_otherwise_after(1000)

    assert texts(0) == ["same=0<eos>", "same=b<eos>"]


def test_behind_a_thousand_rows_none_is_looked_at() -> None:
    texts = asking_otherwise_after(1001)

    with pytest.raises(DataError, match="none of the 1,000 rows that were looked at has another prompt and can be"):
        texts(0)


def test_another_row_that_is_broken_is_named_by_its_own_number() -> None:
    rows = [{"prompt": "a=", "completion": "b", "label": True}, {"prompt": "c=", "completion": "\ud800", "label": True}]
    source = from_rows(rows, "rows")
    texts = with_others([source], in_order(source))

    with pytest.raises(DataError, match="rows row 1: column 'completion' holds half of a UTF-16 pair"):
        texts(0)
