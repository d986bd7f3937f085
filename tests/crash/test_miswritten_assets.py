"""Configuration and tokenizer that are written wrongly: their bytes are what was written, and no model of the run's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.parallel.mesh import World
from holdfast.recipes.sft import sft
from holdfast.training.setup.begin import Live
from tests.training.cases import tree


def swap_two_words(folder: Path) -> None:
    """Give the characters 1 and 2 each other's numbers."""
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    words = values["model"]["vocab"]
    words["1"], words["2"] = words["2"], words["1"]
    file.write_text(json.dumps(values))


def lose_an_end(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:-40])


def change_epsilon(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 0.25}))


def drop_the_end_token(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "a"}))


def careless(kind: type, place: str, damage: Callable[[Path], None]) -> type:
    """Return a class that damages what it writes into folders whose name begins so."""

    class Careless(kind):  # type: ignore[misc]
        def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> Any:
            done = super().save_pretrained(save_directory, *args, **options)
            if Path(save_directory).name.startswith(place):
                damage(Path(save_directory))
            return done

    return Careless


def train(world: World, directory: str, place: str, damage: Callable[[Path], None]) -> Any:
    """Train with a tokenizer, or a configuration, that is damaged while it is written."""
    values = tree(directory, steps=1)
    section = {key: value for key, value in values["model"]["config"].items() if key != "model_type"}
    values["model"] = {"path": "(given in Python)"}
    model, tokenizer = LlamaForCausalLM(LlamaConfig(**section)), character_tokenizer()
    if damage is change_epsilon:
        model.config.__class__ = careless(LlamaConfig, place, damage)
    else:
        tokenizer.__class__ = careless(PreTrainedTokenizerFast, place, damage)
    return sft(from_mapping(values, SFTConfig), Path(), world, Live(model=model, tokenizer=tokenizer))


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (swap_two_words, "tokenizer that was written to .* is another one when it is loaded: tokens of a probe text"),
    (lose_an_end, "tokenizer that was written to .* cannot be loaded"),
    (drop_the_end_token, "tokenizer that was written to .* is another one .*special tokens"),
    (change_epsilon, "configuration that was written to .* is another one .* rms_norm_eps 0.25 instead of 1e-06"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_an_export_whose_assets_are_written_wrongly_is_not_published(
    pools: Any, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    errors = pools(2).errors(train, str(tmp_path), ".staging-", damage)

    assert errors[0] == errors[1]
    assert errors[0][0] == "ExportFailed"
    assert re.search(words, errors[0][1])
    assert list((tmp_path / "r" / "exports").iterdir()) == []


def test_a_tokenizer_that_comes_back_as_another_is_refused_before_the_first_step(pools: Any, tmp_path: Path) -> None:
    errors = pools(2).errors(train, str(tmp_path), "holdfast-assets-", swap_two_words)

    assert errors[0] == errors[1]
    assert errors[0][0] == "RehearsalFailed"
    assert "is another one when it is loaded: tokens of a probe text" in errors[0][1]
    assert errors[0][1].endswith("Nothing was trained.")
    assert not (tmp_path / "r").exists()
