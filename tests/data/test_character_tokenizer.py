"""The tokenizer of single characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.config.sections.data import SourceConfig, TextConfig
from holdfast.data.rows.rows import open_source
from holdfast.data.tasks.synthetic import CHARACTERS, character_tokenizer
from holdfast.data.tokens.chat import RowTokeniser


@pytest.fixture(scope="module")
def characters() -> Any:
    return character_tokenizer()


def test_every_known_character_is_one_token_and_comes_back(characters: Any) -> None:
    tokens = characters(CHARACTERS)["input_ids"]

    assert characters.decode(characters("a\n\n  b")["input_ids"]) == "a\n\n  b"
    assert len(tokens) == len(set(tokens)) == len(CHARACTERS) == 53
    assert characters.decode(tokens) == CHARACTERS
    assert not set(tokens) & set(characters.all_special_ids)


def test_padding_end_and_unknown_are_three_tokens(characters: Any) -> None:
    assert (characters.pad_token_id, characters.eos_token_id) == (0, 1)
    assert characters("aBé")["input_ids"][1:] == [characters.unk_token_id] * 2
    assert characters.unk_token_id not in (0, 1)
    assert len(characters) == 60


def test_text_gets_no_token_of_its_own_at_either_end(characters: Any) -> None:
    assert characters.convert_ids_to_tokens(characters("1+2=")["input_ids"]) == ["1", "+", "2", "="]


def test_special_tokens_in_text_are_one_token_and_can_be_left_out(characters: Any) -> None:
    tokens = characters("12<eos><pad>")["input_ids"]

    assert tokens[2:] == [1, 0]
    assert characters.decode(tokens, skip_special_tokens=True) == "12"


def test_it_survives_saving_and_loading(characters: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    characters.save_pretrained(tmp_path)

    loaded = AutoTokenizer.from_pretrained(tmp_path)

    text = "sort 52803=\n<a|b>_"
    assert loaded(text)["input_ids"] == characters(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.get_vocab() == characters.get_vocab()
    assert loaded.chat_template == characters.chat_template
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.unk_token_id, loaded.bos_token_id) == (0, 1, 2, None)


def test_its_chat_template_marks_the_assistants_words(characters: Any) -> None:
    row = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "1+1="},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "2+2="},
            {"role": "assistant", "content": "4"},
        ]
    }

    (example,) = RowTokeniser(characters, TextConfig(), Path()).examples(row, 0, "sums").examples

    assert characters.decode(example.tokens) == "<system>be brief<user>1+1=<assistant>2<eos><user>2+2=<assistant>4<eos>"
    assert characters.decode(example.tokens[example.loss_mask]) == "2<eos>4<eos>"


@pytest.mark.parametrize("task", ["sort", "reverse", "add", "countdown"])
def test_generated_tasks_have_no_unknown_character(task: str, characters: Any) -> None:
    config = SourceConfig.model_validate({"synthetic": {"task": task, "rows": 200, "noise": 0.5}})
    source, tokeniser = open_source(config, Path()), RowTokeniser(characters, TextConfig(), Path())

    for index, row in enumerate(source.scan(0)):
        (example,) = tokeniser.examples(row, index, task).examples
        assert characters.unk_token_id not in example.tokens
        assert characters.decode(example.tokens) == row["prompt"] + row["completion"] + "<eos>"
        assert characters.decode(example.tokens[example.loss_mask]) == row["completion"] + "<eos>"
