"""An embedding that is too small for its tokenizer is refused, or grown row by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.config.sections.model import ModelConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.errors import ModelError
from holdfast.models.setup.model import blueprint
from tests.models.architectures import strong_model
from tests.models.cases import import_and_export, whole_parameters
from tests.models.directories import filled, tensors_in, write_directory

NEEDED = len(character_tokenizer())
ROWS = 41

EMBEDDINGS = {
    "llama": {"model.embed_tokens.weight", "lm_head.weight"},
    "gemma3": {"model.language_model.embed_tokens.weight"},
    "phi": {"model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"},
}
"""What grows: untied, tied below another prefix, with a bias."""


def overrides(kind: str) -> dict[str, Any]:
    if kind != "gemma3":
        return {"vocab_size": ROWS}
    from tests.models.directories import MULTIMODAL

    return {"text_config": MULTIMODAL["gemma3"]["text_config"] | {"vocab_size": ROWS}}


def test_a_tokenizer_larger_than_the_embedding_is_refused_with_both_numbers(tmp_path: Path) -> None:
    write_directory(tmp_path, "llama", vocab_size=ROWS)

    with pytest.raises(
        ModelError, match=rf"ids up to {NEEDED - 1}, the model's embedding has {ROWS} rows.*resize_vocab"
    ):
        filled(tmp_path)


def test_an_embedding_with_room_to_spare_is_left_alone(tmp_path: Path) -> None:
    write_directory(tmp_path, "llama", vocab_size=NEEDED + 30)

    policy, origin = filled(tmp_path, resize_vocab=True)

    assert policy.language_model.get_input_embeddings().weight.shape[0] == NEEDED + 30  # type: ignore[operator]
    assert origin.notes == ()


@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_grown_rows_are_the_mean_and_old_rows_stay(tmp_path: Path, kind: str) -> None:
    saved = write_directory(tmp_path, kind, **overrides(kind)).state_dict()

    policy, origin = filled(tmp_path, resize_vocab=True)

    found = dict(policy.language_model.named_parameters())
    grown = {name for name, value in found.items() if value.shape != saved[name].shape}
    assert grown == EMBEDDINGS[kind]
    for name in grown:
        assert found[name].shape[0] == NEEDED
        assert torch.equal(found[name][:ROWS], saved[name])
        mean = saved[name].double().mean(0)
        torch.testing.assert_close(found[name][ROWS:].double(), mean.expand(NEEDED - ROWS, *mean.shape))
    for name in set(found) - grown:
        assert torch.equal(found[name], saved[name]), name
    assert origin.notes == (f"vocabulary grown from {ROWS} to {NEEDED}",)


def test_grown_embeddings_stay_tied(tmp_path: Path) -> None:
    write_directory(tmp_path, "llama", vocab_size=ROWS, tie_word_embeddings=True)

    model = filled(tmp_path, resize_vocab=True)[0].language_model

    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore[operator]


@pytest.mark.parametrize("tied", [True, False])
def test_two_ranks_grow_the_same_rows(pools: Any, tmp_path: Path, tied: bool) -> None:
    write_directory(tmp_path, "llama", vocab_size=ROWS, tie_word_embeddings=tied)
    expected = dict(filled(tmp_path, resize_vocab=True)[0].language_model.named_parameters())

    for parameters, _ in pools(2).run(whole_parameters, {"path": str(tmp_path), "resize_vocab": True}):
        assert set(parameters) == set(expected)
        for name, value in expected.items():
            assert torch.equal(torch.from_numpy(parameters[name]), value.detach().double()), name


def test_an_export_says_how_large_the_vocabulary_has_become(pools: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source, target = tmp_path / "in", tmp_path / "out"
    write_directory(source, "llama", vocab_size=ROWS)

    pools(2).run(import_and_export, str(source), str(target), 10**9, {"resize_vocab": True})

    assert json.loads((target / "config.json").read_text())["vocab_size"] == NEEDED
    loaded = AutoModelForCausalLM.from_pretrained(target).state_dict()
    assert torch.equal(loaded["lm_head.weight"][:ROWS], tensors_in(source)["lm_head.weight"])
    assert loaded["lm_head.weight"].shape[0] == NEEDED


def test_a_model_in_memory_is_not_grown_behind_its_owners_back() -> None:
    live = strong_model("llama", vocab_size=ROWS)
    config = ModelConfig(path="unused", resize_vocab=True)

    with pytest.raises(ModelError, match=rf"resize_token_embeddings\({NEEDED}\) first"):
        blueprint(config, Path.cwd(), seed=0, live=live, tokenizer=character_tokenizer())
