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
from tests.cli.screens import numbers
from tests.messages import Said
from tests.models.directories import config_of, write_directory
from tests.vision_derived import derived_directory, derived_side

EXPECTED = {
    "phi3:longrope": {"attention": "rotary angles depend on the length", "lengths": " 6, 20 "},
    "phimoe": {"attention": "packed", "rollouts": "process"},
    "gemma4": {"attention": "packed", "lengths": " 6 "},
    "llama4": {"attention": "chunked_attention", "rollouts": "transformers' generate", "lengths": " 16 "},
}
"""Words of the lines that begin so."""


def lines_of(out: str) -> dict[str, str]:
    """Return what is said of a model, by what the lines begin with; without times and measured differences."""
    told: dict[str, str] = {}
    for line in out.splitlines():
        name, _, words = line.partition(": ")
        told[name] = f"{told[name]}; {words}" if name in told else words
    return {name: told[name] for name in ("lengths", "looked at", "attention", "rollouts", "lora")}


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_model_without_weights_is_looked_at_as_a_small_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: Said, kind: str
) -> None:
    config_of(kind).save_pretrained(tmp_path)

    assert check(str(tmp_path / "config.json"), []) == 0

    out = capsys.readouterr().out
    lines = lines_of(out)
    assert {name: words for name, words in EXPECTED[kind].items() if words not in lines[name]} == {}
    assert "small model" in lines["looked at"]
    assert "gradients of" in out
    assert "refused" in out.splitlines()[-1]
    said("\n".join([*(f"{name}: {line}" for name, line in lines.items() if name != "lora"), out.splitlines()[-1]]))


def test_a_small_model_with_weights_is_looked_at_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: Said
) -> None:
    write_directory(tmp_path / "model", "gpt2")
    (tmp_path / "run.yaml").write_text(
        "steps: 1\nmodel: {path: model, lora: {rank: 4}}\ndata: {path: rows, batch_size: 1, max_length: 64}\n"
    )

    assert check(str(tmp_path / "run.yaml"), []) == 0

    lines = lines_of(capsys.readouterr().out)
    assert "small" not in lines["looked at"]
    assert lines["lora"].startswith("c_attn, c_proj, c_fc (")
    assert numbers(lines["lora"])[:2] == [4, 8]
    said("\n".join(f"{name}: {line}" for name, line in lines.items()))


def test_a_model_that_cannot_be_trained_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))

    assert check(str(tmp_path), []) == 1

    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("refused: ")


def test_what_is_no_model_is_a_wrong_argument(tmp_path: Path, said: Said) -> None:
    with pytest.raises(ConfigError, match=r"/nothing\b.* config\.json") as raised:
        check(str(tmp_path / "nothing"), [])

    said(str(raised.value))


@pytest.mark.parametrize("kind", ["qwen3_5", "internvl"])
def test_what_the_processor_says_of_images_is_told_and_how_that_was_proved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    directory = derived_directory(tmp_path / "model", kind)
    side = derived_side(directory)

    assert check(str(directory), []) == 0

    out = capsys.readouterr().out
    assert f"images: {side.described()[0]}" in out
    assert side.family.placeholder in out
    assert re.search(r"features of images \(\d+, \d+, \d+,", out), out


def test_of_a_model_without_weights_features_are_counted_in_a_small_tower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = derived_directory(tmp_path / "model", "qwen3_5")
    (directory / "model.safetensors").unlink()

    assert check(str(directory), []) == 0

    assert "images: a small tower " in capsys.readouterr().out


@pytest.mark.parametrize("model_type", ["cohere2_vision", "kimi_k25"])
def test_what_needs_torchvision_is_named(model_type: str) -> None:
    reason = image_side(None, None, AutoConfig.for_model(model_type))

    assert isinstance(reason, str)
    assert "needs torchvision" in reason
