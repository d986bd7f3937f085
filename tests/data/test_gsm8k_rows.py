"""All rows of a real data set, as pairs and as conversations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.sections.data import SourceConfig, TextConfig
from holdfast.data.content.formats import row_shape
from holdfast.data.rows.rows import columns_of, open_source
from holdfast.data.tokens.chat import RowTokeniser

TEMPLATES = Path(__file__).parent / "templates"


@pytest.fixture(scope="module")
def rows(gsm8k: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in gsm8k.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer(rows: list[dict[str, str]], train_bpe: Callable[[list[str], int], Any]) -> Any:
    return train_bpe([text for row in rows[:500] for text in row.values()], 2000)


@pytest.mark.slow
def test_the_trained_tokens_of_every_pair_are_its_answer(
    gsm8k: Path, rows: list[dict[str, str]], tokenizer: Any
) -> None:
    config = SourceConfig(path=str(gsm8k), columns={"prompt": "question", "completion": "answer"})
    source = open_source(config, Path())
    formats = {source.name: row_shape(columns_of(source))}
    tokeniser = RowTokeniser(tokenizer, TextConfig(max_length=2048, overlong="refuse"), Path(), formats=formats)

    assert source.size == len(rows) == 7473
    for index, row in enumerate(rows):
        (example,) = tokeniser.examples(source.row(index), index, source.name).examples
        assert tokenizer.decode(example.tokens[example.loss_mask]) == row["answer"] + "</s>"
        assert tokenizer.decode(example.tokens[~example.loss_mask]) == row["question"]


@pytest.mark.slow
def test_the_trained_tokens_of_every_conversation_are_its_answer(
    gsm8k: Path, rows: list[dict[str, str]], tokenizer: Any
) -> None:
    config = SourceConfig(path=str(gsm8k), columns={"instruction": "question", "output": "answer"}, streaming=True)
    source = open_source(config, Path())
    text = TextConfig(max_length=2048, chat_template=(TEMPLATES / "chatml.jinja").read_text(), system="Be exact.")
    tokeniser = RowTokeniser(tokenizer, text, Path())

    number = 0
    for row, pair in zip(source.scan(0), rows, strict=True):
        result = tokeniser.examples(row, number, source.name)
        (example,) = result.examples
        assert tokenizer.decode(example.tokens[example.loss_mask]) == pair["answer"] + "<|im_end|>"
        assert result.counts == {}
        number += 1
    assert number == 7473
