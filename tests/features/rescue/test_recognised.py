"""Which checkpoint of a run is read, which loader's state says rows, and what a model directory lacks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from holdfast.features.rescue.reading.examine import examine
from holdfast.features.rescue.reading.rank_files import position_of
from holdfast.features.rescue.reading.recognise import open_foreign
from holdfast.features.rescue.reading.record import DamagedFile, Position
from tests.features.rescue.damages import state_of
from tests.features.rescue.reading import place_of
from tests.features.rescue.test_damage import copied, said_of
from tests.features.rescue.test_import import tokens

__all__ = ["tokens"]  # a fixture of these tests, too


@pytest.mark.parametrize(("name", "step"), [("trainer-full", "checkpoint-10"), ("verl-fsdp2", "global_step_9")])
def test_an_empty_newest_step_does_not_hide_an_earlier_one(
    fixtures: Path, name: str, step: str, tmp_path: Path
) -> None:
    path = copied(fixtures, name, tmp_path)
    run = path.parent if name == "trainer-full" else path
    (run / "latest_checkpointed_iteration.txt").unlink(missing_ok=True)
    (run / step / "actor").mkdir(parents=True)

    checkpoint = open_foreign(run)

    assert checkpoint.step == 2
    assert not checkpoint.of_kind("damage")
    assert any(f"{step} is empty" in note.text for note in checkpoint.of_kind("note")) == (name == "trainer-full")


def test_a_link_to_the_same_checkpoint_is_no_second_one(fixtures: Path, tmp_path: Path) -> None:
    shutil.copyfile(place_of(fixtures / "lightning-mp-full"), tmp_path / "epoch=1.ckpt")
    (tmp_path / "last.ckpt").symlink_to("epoch=1.ckpt")

    assert open_foreign(tmp_path).step == 2


def test_an_optimizer_whose_parameters_nobody_can_name_leaves_the_weights_readable(
    fixtures: Path, tmp_path: Path
) -> None:
    path = copied(fixtures, "lightning-mp-full", tmp_path)
    state_of(path, lambda content: content["optimizer_states"][0].update(state={0: {}}, param_groups=[{"params": [0]}]))

    checkpoint = open_foreign(path)
    examine(checkpoint)

    assert not checkpoint.of_kind("damage")
    assert not checkpoint.has_optimizer
    assert any("it is not read" in each.text for each in checkpoint.of_kind("loss"))


@pytest.mark.parametrize(("since", "rows"), [(0, 8), (3, 20)])
def test_the_rows_of_a_loader_with_workers_are_read(since: int, rows: int) -> None:
    main = {"_num_workers": 2, "_sampler_iter_state": {"samples_yielded": 8}}
    state = {"_snapshot": {"_snapshot_step": 2, "_main_snapshot": main}, "_steps_since_snapshot": since}

    assert position_of(state) == Position(None, rows=rows)


def test_a_number_of_rows_below_zero_is_refused() -> None:
    with pytest.raises(DamagedFile, match="number of batches is -7"):
        position_of({"_num_yielded": -7})


def test_a_model_directory_that_lacks_a_weight_of_its_configuration_is_named(tokens: Path, tmp_path: Path) -> None:
    shutil.copytree(tokens, tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    weights = load_file(file)
    assert said_of(tmp_path / "model") == ""
    del weights["model.norm.weight"]
    save_file(weights, file, {"format": "pt"})

    assert "lacks 1 weights of its configuration's model, such as model.norm.weight" in said_of(tmp_path / "model")


def test_a_name_in_two_files_of_safetensors_is_named(tokens: Path, tmp_path: Path) -> None:
    shutil.copytree(tokens, tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    (tmp_path / "model/model.safetensors").unlink()
    files = {name: "a.safetensors" if name.startswith("model.layers.0.") else "b.safetensors" for name in weights}
    first = {name: value for name, value in weights.items() if files[name] == "a.safetensors"}
    save_file(first, tmp_path / "model/a.safetensors", {"format": "pt"})
    save_file(weights, tmp_path / "model/b.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))

    assert "b.safetensors holds model.layers.0." in said_of(tmp_path / "model")
