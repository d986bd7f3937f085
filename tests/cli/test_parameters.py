"""`holdfast model parameters`: the names that patterns are written for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.commands.model import parameters
from holdfast.errors import ModelError
from tests.cli.fixtures import write_run
from tests.tiny import COMMON

MODEL = {"config": {"model_type": "llama", **COMMON}, "tokenizer": "builtin:characters"}


def names(path: Path, *overrides: str) -> list[str]:
    return [line.split("  ")[0] for line in parameters(path, overrides)]


def test_those_of_a_reward_model_are_of_the_model_that_is_trained(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"model": MODEL, "data": {"synthetic": {"task": "sort"}}, "steps": 1}
    write_run(tmp_path / "run.yaml", tree | {"preference": {"loss": "bradley_terry"}})

    found = names(tmp_path / "run.yaml")

    assert "score.weight" in found
    assert "lm_head.weight" not in found


def test_the_command_in_the_message_about_a_pattern_prints_the_names(tmp_path: Path) -> None:
    model = {**MODEL, "freeze": ["lm_heads"]}
    write_run(tmp_path / "run.yaml", {"model": model, "data": {"synthetic": {"task": "sort"}}, "steps": 1})

    with pytest.raises(ModelError) as refusal:
        names(tmp_path / "run.yaml")
    override = re.search(r"`holdfast model parameters RUN\.yaml '(.*?)'`", str(refusal.value))

    assert override is not None
    assert "lm_head.weight" in names(tmp_path / "run.yaml", override[1])
