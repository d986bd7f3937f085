"""A tokenizer is what its file says, whatever transformers makes of the model beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.config.sections.model import ModelConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.models.source.origin import load_tokenizer
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
