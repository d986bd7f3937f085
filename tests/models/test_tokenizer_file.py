"""A tokenizer is what its file says, whatever transformers makes of the model beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.config.sections.model import ModelConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.models.files.origin import load_tokenizer
from tests.tiny import tiny_directory


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mixtral"])
def test_a_directory_s_own_tokenizer_is_used(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny_directory(tmp_path / kind, kind)

    found = load_tokenizer(ModelConfig(path=str(directory)), tmp_path)

    own, text = character_tokenizer(), "sort 31=13"
    assert found(text, add_special_tokens=False)["input_ids"] == own(text, add_special_tokens=False)["input_ids"]
    assert found.eos_token_id == own.eos_token_id
    assert found.pad_token_id == own.pad_token_id
    assert ("tokenizer.json; the file is used" in capsys.readouterr().out) is (kind == "qwen2")


@pytest.mark.parametrize(
    ("own", "processor", "used"),
    [
        (None, None, None),
        (None, "of pictures", "of pictures"),
        ("of text", None, "of text"),
        ("of text", "of pictures", "of text"),
    ],
)
def test_the_template_of_a_processor_is_used_where_the_tokenizer_has_none(
    tmp_path: Path, own: str | None, processor: str | None, used: str | None
) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = own
    tokenizer.save_pretrained(tmp_path)
    if processor is not None:
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": processor}))

    found = load_tokenizer(ModelConfig(path="given", tokenizer=str(tmp_path)), tmp_path)

    assert found.chat_template == used
