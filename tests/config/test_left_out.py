"""What an export left out is missed where an evaluation needs it, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.config.base import LEFT_OUT, MARKS
from holdfast.config.load import load_config
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.yaml12 import to_yaml
from holdfast.errors import ConfigError


def exported(folder: Path, name: str = "holdfast.yaml", **changes: Any) -> Path:
    """Write the configuration of a policy's export."""
    tree = {
        "steps": 2,
        "model": {"config": LEFT_OUT, "config_override": LEFT_OUT, "image_processor": LEFT_OUT},
        "optim": {"kind": "path", "path": "own.py:SGD", "kwargs": LEFT_OUT},
        "data": {"path": "rows.jsonl"},
        "reward": ["exact"],
    }
    file = folder / name
    file.write_text(to_yaml(tree | changes))
    return file


def test_an_export_does_without_what_training_and_its_own_files_know(tmp_path: Path) -> None:
    config = load_config(exported(tmp_path), [f"model.path={tmp_path}"], GRPOConfig).config

    assert (config.model.config, config.model.config_override, config.model.image_processor) == (None, {}, None)
    assert config.optim.kwargs == {}


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"reward": [{"kind": "path", "path": "a.py:f", "kwargs": LEFT_OUT}]}, ["reward.0.kwargs"]),
        ({"objective": {"kind": "path", "path": "a.py:f", "kwargs": LEFT_OUT}}, ["objective.kwargs"]),
        ({"rollout": {"engine": {"kind": "path", "path": "a.py:f", "kwargs": LEFT_OUT}}}, ["rollout.engine.kwargs"]),
        ({"environment": {"kind": "endpoint", "command": LEFT_OUT}}, ["environment.command"]),
        ({"data": {"path": "r.jsonl", "template_kwargs": {"a": 1, "b": LEFT_OUT}}}, ["data.template_kwargs.b"]),
        ({"data": {"path": "r.jsonl", "system": MARKS[1]}}, ["data.system"]),
    ],
)
def test_what_measures_is_missed_by_name(tmp_path: Path, changes: dict[str, Any], keys: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(exported(tmp_path, **changes), [f"model.path={tmp_path}"], GRPOConfig)

    lines = [line for line in str(raised.value).splitlines() if "holdfast eval RUN.yaml" in line]
    assert [line.split(": ")[1] for line in lines] == keys


def test_a_text_that_begins_like_the_mark_is_a_text(tmp_path: Path) -> None:
    file = exported(tmp_path, data={"path": "r.jsonl", "system": "left out: x"})

    assert load_config(file, [f"model.path={tmp_path}"], GRPOConfig).config.data.system == "left out: x"


def test_what_is_missed_hides_no_other_mistake(tmp_path: Path) -> None:
    judge = {"kind": "judge", "url": "https://host:8000/v1", "model": "big", "prompt": LEFT_OUT}
    reward = [{"kind": "path", "path": LEFT_OUT, "kwargs": LEFT_OUT}, judge]
    file = exported(tmp_path, reward=reward, data={"path": LEFT_OUT, "max_lenght": 5}, steps=0)

    with pytest.raises(ConfigError) as raised:
        load_config(file, [f"model.path={tmp_path}"], GRPOConfig)

    keys = [line.split(": ")[1] for line in str(raised.value).splitlines() if "holdfast.yaml:" in line]
    assert sorted(keys) == [
        "data.max_lenght", "data.path", "reward.0.kwargs", "reward.0.path", "reward.1.prompt", "steps",
    ]  # fmt: skip


def test_a_file_that_is_no_export_does_without_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(exported(tmp_path, "copied.yaml"), [f"model.path={tmp_path}"], GRPOConfig)

    keys = {line.split(": ")[1] for line in str(raised.value).splitlines() if "copied.yaml:" in line}
    assert keys == {"model.config", "model.config_override", "model.image_processor", "optim.kwargs"}
