"""`holdfast model check` says of a model what a run would find before step 1."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from holdfast.cli.commands.model import check
from holdfast.errors import ConfigError
from holdfast.models.files.vision import image_side
from tests.models.directories import config_of, write_directory
from tests.vision_derived import derived_directory, derived_side

EXPECTED = {
    "phi3:longrope": ("attention: packed", "rotary angles change there at 20; a policy whose prompt"),
    "phimoe": ("attention: packed", "rollouts: decoded in this process"),
    "gemma4": ("attention: packed", "lengths: computed otherwise beyond 6 tokens"),
    "llama4": ("attention: one document per row, since its chunked_attention layers", "rollouts: by transformers'"),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_model_without_weights_is_looked_at_as_a_small_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    config_of(kind).save_pretrained(tmp_path)

    assert check(str(tmp_path / "config.json"), []) == 0

    said = capsys.readouterr().out
    for words in (*EXPECTED[kind], "looked at: a small model", "gradients of", "nothing is refused"):
        assert words in said, said


def test_a_small_model_with_weights_is_looked_at_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_directory(tmp_path / "model", "gpt2")
    (tmp_path / "run.yaml").write_text(
        "steps: 1\nmodel: {path: model, lora: {rank: 4}}\ndata: {path: rows, batch_size: 1, max_length: 64}\n"
    )

    assert check(str(tmp_path / "run.yaml"), []) == 0

    said = capsys.readouterr().out
    assert "looked at: the model itself" in said
    assert "lora: c_attn, c_proj, c_fc (rank 4 on 8 layers" in said


def test_a_model_that_cannot_be_trained_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))

    assert check(str(tmp_path), []) == 1

    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("refused: ")


def test_what_is_no_model_is_a_wrong_argument(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none of what can be checked: a model's directory or its config\.json"):
        check(str(tmp_path / "nothing"), [])


@pytest.mark.parametrize("kind", ["qwen3_5", "internvl"])
def test_what_the_processor_says_of_images_is_told_and_how_that_was_proved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    directory = derived_directory(tmp_path / "model", kind)
    side = derived_side(directory)

    assert check(str(directory), []) == 0

    said = capsys.readouterr().out
    assert f"images: {side.described()[0]}" in said
    assert side.family.placeholder in said
    assert re.search(r"features of images \(\d+, \d+, \d+, as many as tokens\)", said), said


def test_of_a_model_without_weights_features_are_counted_in_a_small_tower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = derived_directory(tmp_path / "model", "qwen3_5")
    (directory / "model.safetensors").unlink()

    assert check(str(directory), []) == 0

    assert "images: a small tower makes as many features as there are tokens (" in capsys.readouterr().out


@pytest.mark.parametrize("model_type", ["cohere2_vision", "kimi_k25"])
def test_what_needs_torchvision_is_named(model_type: str) -> None:
    said = image_side(None, None, AutoConfig.for_model(model_type))

    assert isinstance(said, str)
    assert "needs torchvision" in said
