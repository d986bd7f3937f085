"""What stands for the defaults about frozen parameters, by device, model and the checkpoint that a run starts from."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.keep import find
from holdfast.config.load import from_mapping, parse_file
from holdfast.config.verbs.training import SFTConfig
from holdfast.training.run import ConfiguredRun
from holdfast.training.setup.frozen import _choices, settled_for_plan
from tests.cli.fixtures import write_run
from tests.tiny import tiny_directory
from tests.training.cases import run, tree

LORA = {"lora": {"rank": 2}}


def configured(place: Path, **sections: Any) -> ConfiguredRun:
    return ConfiguredRun(config=from_mapping(tree(str(place), **sections), SFTConfig), base=place)


def settled(place: Path, device: str = "cuda", **sections: Any) -> SFTConfig:
    config = settled_for_plan(configured(place, **sections), device)[0]
    assert isinstance(config, SFTConfig)
    return config


@pytest.mark.parametrize(
    ("device", "sections", "expected"),
    [
        ("cuda", {"model": LORA}, "bfloat16"),
        ("cuda", {"model": LORA, "parallel": {"compute_dtype": "bfloat16"}}, "bfloat16"),
        ("cuda", {"model": LORA, "parallel": {"compute_dtype": "float32"}}, "same"),
        ("cuda", {"model": LORA | {"dtype": "float64"}}, "same"),
        ("cuda", {"model": LORA | {"frozen_dtype": "same"}}, "same"),
        ("cuda", {"model": LORA | {"frozen_dtype": "float32"}}, "float32"),
        ("cuda", {"model": {"freeze": ["embed"]}}, "same"),
        ("cpu", {"model": LORA}, "same"),
        ("cpu", {"model": LORA, "parallel": {"compute_dtype": "bfloat16"}}, "same"),
    ],
)
def test_frozen_weights_are_bfloat16_under_adapters_on_a_card_that_computes_so(
    tmp_path: Path, device: str, sections: dict[str, Any], expected: str
) -> None:
    assert configured(tmp_path, **sections).config.frozen_dtype(device) == expected
    assert settled(tmp_path, device, **sections).model.frozen_dtype == expected


def test_a_run_without_adapters_records_values_and_no_default(pools: Any, tmp_path: Path) -> None:
    pools(1).run(run, tree(str(tmp_path), steps=1))

    values = parse_file(tmp_path / "r/config.resolved.yaml").values
    assert (values["model"]["frozen_dtype"], values["checkpoint"]["frozen"]) == ("same", "save")


def test_frozen_weights_of_a_checkpoint_are_not_left_out_by_later_ones(pools: Any, tmp_path: Path) -> None:
    base = tiny_directory(tmp_path / "base", "llama")
    model = LORA | {"path": str(base), "config": None, "tokenizer": None}
    pools(1).run(run, tree(str(tmp_path), steps=1, model=model, checkpoint={"frozen": "save"}))
    left = sorted(tmp_path.rglob("*"))

    (kind, message), *_ = pools(1).errors(run, tree(str(tmp_path), steps=2, model=model, checkpoint={"frozen": "skip"}))

    assert kind == "ConfigError"
    assert all(word in message for word in ("checkpoint.frozen: skip", "step-00000001", "checkpoint.frozen: save"))
    assert sorted(tmp_path.rglob("*")) == left
    pools(1).run(run, tree(str(tmp_path), steps=2, model=model))
    newest = find.one(str(tmp_path / "r")).manifest
    assert (newest.step, newest.contents[0]) == (2, "model")


@pytest.mark.parametrize(("model", "lines"), [(LORA, 1), (LORA | {"frozen_dtype": "bfloat16"}, 0)])
def test_a_default_that_changes_something_is_said(tmp_path: Path, model: dict[str, Any], lines: int) -> None:
    said = settled_for_plan(configured(tmp_path, model=model), "cuda")[1]

    assert sum("model.frozen_dtype" in line for line in said) == lines
    assert settled_for_plan(configured(tmp_path, model=model), "cpu")[1] == []


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("model", "checkpoint", "expected"),
    [
        ({"path": "DIR/model"}, {}, "skip"),
        ({"path": "DIR/model"}, {"frozen": "save"}, "save"),
        ({"path": "DIR/model"}, {"storage": "s3://bucket/run"}, "save"),
        ({"path": "DIR/absent"}, {}, "save"),
        ({"path": "DIR/earlier/exports/final"}, {}, "save"),
        ({"path": "name/of-the-hub", "revision": COMMIT}, {}, "skip"),
        ({"path": "name/of-the-hub", "revision": COMMIT}, {"storage": "s3://bucket/run"}, "skip"),
        ({"path": "name/of-the-hub", "revision": COMMIT[:12]}, {}, "save"),
        ({"path": "name/of-the-hub", "revision": "main"}, {}, "save"),
        ({"path": "name/of-the-hub"}, {}, "save"),
        ({"path": "name/of-the-hub"}, {"frozen": "skip"}, "skip"),
        ({}, {}, "save"),
    ],
)
def test_frozen_weights_are_left_out_where_the_model_stays_what_it_is(
    tmp_path: Path, model: dict[str, Any], checkpoint: dict[str, Any], expected: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "earlier/exports/final").mkdir(parents=True)
    (tmp_path / "earlier/run.json").write_text("{}")
    if model:
        model = model | {"path": model["path"].replace("DIR", str(tmp_path)), "config": None}
    section = {"model": LORA | model, "checkpoint": checkpoint}
    run = configured(tmp_path, **section)

    choices = _choices(run, "cpu", None, live=False)

    assert choices.frozen == expected
    assert _choices(run, "cpu", None, live=True).frozen == checkpoint.get("frozen", "save")


def test_frozen_weights_are_saved_where_the_model_lies_among_temporary_files_and_the_run_does_not() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = LORA | {"path": folder, "config": None}
        expected = {str(Path.cwd()): "save", folder: "skip"}

        chosen = {place: settled(Path(place), model=model).checkpoint.frozen for place in expected}

    assert chosen == expected


def test_a_run_that_began_otherwise_goes_on_so_and_so_does_what_starts_from_it(pools: Any, tmp_path: Path) -> None:
    pools(1).run(run, tree(str(tmp_path), steps=1, model=LORA))
    step = str(tmp_path / "r/checkpoints/step-00000001")

    assert settled(tmp_path, model=LORA).model.frozen_dtype == "same"
    assert len(settled_for_plan(configured(tmp_path, model=LORA), "cuda")[1]) == 1
    assert settled(tmp_path, model=LORA | {"frozen_dtype": "bfloat16"}).model.frozen_dtype == "bfloat16"
    for checkpoint in ({"init_from": step}, {"resume": {"from": step}}, {"resume": {"from": str(tmp_path / "r")}}):
        other = {"model": LORA, "checkpoint": checkpoint, "run": {"name": "other"}}
        assert settled(tmp_path, **other).model.frozen_dtype == "same"
    assert settled(tmp_path, model=LORA, run={"name": "other"}).model.frozen_dtype == "bfloat16"


@pytest.mark.gpu
@pytest.mark.slow
def test_a_run_that_began_on_a_gpu_goes_on_in_bfloat16_on_a_cpu(tmp_path: Path) -> None:
    for steps, device in ((1, "cuda"), (2, "cpu")):
        values = tree(str(tmp_path), steps=steps, model=LORA, launch={"ranks": 1, "device": device})
        write_run(tmp_path / "run.yaml", values)
        command = [sys.executable, "-m", "holdfast.cli.main", "sft", "run.yaml"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr

        tensors = find.one(str(tmp_path / "r")).manifest.tensors
        weights = {name: entry for name, entry in tensors.items() if name.startswith("model.")}
        assert {entry.dtype for entry in weights.values() if not entry.requires_grad} == {"bfloat16"}
        assert {entry.dtype for entry in weights.values() if entry.requires_grad} == {"float32"}
