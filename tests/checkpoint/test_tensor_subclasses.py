"""Quantised state, in torchao's classes: bit for bit where blocks allow it, else refused; and other classes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from holdfast import checkpoint
from holdfast.checkpoint.errors import CheckpointCorrupt
from holdfast.checkpoint.format.manifest import NAME, Manifest, parse
from holdfast.checkpoint.inspect.compare import differences
from holdfast.checkpoint.keep.find import one
from holdfast.cli.main import app
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build, optimizer_of
from tests.checkpoint.damage import place_of, rewrite_manifest
from tests.checkpoint.quantised import Scaled, loaded_again, numbers_of, resumed, save_it, straight, try_to_load

KINDS = ["8bit", "4bit", "fp8", "torchao"]
PARTS = {
    "8bit": {"codes": "torch.uint8", "scale": "torch.float32", "qmap": "torch.float32"},
    "4bit": {"codes": "torch.uint8", "scale": "torch.float32", "qmap": "torch.float32"},
    "fp8": {"codes": "torch.float8_e4m3fn", "scale": "torch.float32"},
    "torchao": {"codes": "torch.uint8", "scale": "torch.float32", "qmap": "torch.float32"},
}
UP = "blocks.0.up.weight"


@pytest.fixture(scope="module")
def runs(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return, by ranks and kind, where a straight run saved, and what it had on rank 0."""
    made: dict[tuple[int, str], tuple[str, dict[str, Any]]] = {}

    def run(ranks: int, kind: str) -> tuple[str, dict[str, Any]]:
        if (ranks, kind) not in made:
            path = str(tmp_path_factory.mktemp("run"))
            made[ranks, kind] = path, pools(ranks).run(straight, kind, path)[0]
        return made[ranks, kind]

    return run


@pytest.mark.parametrize(("ranks", "kind"), [*((2, kind) for kind in KINDS), (1, "8bit"), (1, "torchao")])
def test_quantised_state_comes_back_in_its_class_and_goes_on_bit_for_bit(
    pools: Any, runs: Any, ranks: int, kind: str
) -> None:
    path, straight_run = runs(ranks, kind)

    found = pools(ranks).run(resumed, kind, path)[0]

    assert straight_run["untouched"]
    assert straight_run["rehearsed"]  # the same names, shapes, dtypes and classes as after a real step
    assert found["middle"] == straight_run["middle"]
    assert found["end"] == straight_run["end"]
    assert {part: found["middle"][f"{UP} exp_avg/{part}"][1] for part in PARTS[kind]} == PARTS[kind]
    checkpoint.verify(f"{path}/step-00000003")


def rows_of_all(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what each shard has of its own, one row per shard."""
    return {name: value for name, value in contents.items() if not name.endswith("/qmap")}


@pytest.mark.parametrize(("ranks", "kind"), [(1, "8bit"), (4, "8bit"), (4, "4bit"), (1, "fp8")])
def test_other_shards_whose_edges_fall_on_blocks_hold_the_same_bits(
    pools: Any, runs: Any, ranks: int, kind: str
) -> None:
    path, straight_run = runs(2, kind)

    found = pools(ranks).run(resumed, kind, path, [])[0]

    assert rows_of_all(found["middle"]) == rows_of_all(straight_run["middle"])


def test_a_checkpoint_of_other_shards_differs_in_no_tensor(pools: Any, runs: Any, tmp_path: Path) -> None:
    path, _ = runs(2, "8bit")
    pools(1).run(loaded_again, "8bit", path, str(tmp_path))

    found = list(differences(one(f"{path}/step-00000003"), one(f"{tmp_path}/step-00000003")))

    assert {each.partition(".json")[0] for each in found} == {"rank/rank-00000", "rank/shard-0", "rank/shard-1"}


def test_edges_within_blocks_are_refused_with_one_paragraph_and_nothing_changes(pools: Any, runs: Any) -> None:
    path, _ = runs(2, "8bit, 68 rows")

    found = pools(4).run(try_to_load, "8bit, 68 rows", path)

    assert found == [found[0]] * 4
    assert found[0]["error"][0] == "CheckpointMismatch"
    assert found[0]["same"]
    assert (
        "state exp_avg of blocks.0.side.weight is a torchao.optim.subclass_8bit.OptimState8bit that 2 shards were "
        "saved of, and shards of 17 rows cut its blocks, which are 2 rows each, so it cannot come back bit for bit; "
        "dequantise it and quantise it anew (allow it with resume.cast)"
    ) in found[0]["error"][1]


def test_a_declared_cast_quantises_the_same_numbers_anew(pools: Any, runs: Any) -> None:
    path, _ = runs(2, "8bit, 68 rows")
    saved = pools(2).run(numbers_of, "8bit, 68 rows", path, [])[0]

    found = pools(4).run(numbers_of, "8bit, 68 rows", path, ["."])[0]

    assert saved["notes"] == ()
    cast = "blocks.0.side.weight"
    assert [note for note in found["notes"] if note.endswith("(resume.cast)") and cast in note]
    assert found["numbers"].keys() == saved["numbers"].keys()
    for name, numbers in found["numbers"].items():
        before = saved["numbers"][name]
        # Half the widest gap between neighbours of the dynamic 8-bit table is 0.7% of a block's largest number.
        assert float((numbers - before).abs().max()) <= 0.008 * float(before.abs().max())
    assert float(found["numbers"][f"{cast} exp_avg"].abs().max()) > 0
    # Of 17 rows of 128 elements, which are no whole blocks, the optimizer keeps plain numbers.
    assert found["kinds"] == {"Tensor", "OptimState8bit"}


@pytest.mark.parametrize("part", ["codes", "scale", "qmap"])
def test_a_flipped_byte_is_named_by_its_part(runs: Any, tmp_path: Path, part: str) -> None:
    path, _ = runs(2, "8bit")
    copy = Path(shutil.copytree(path, tmp_path / "run")) / "step-00000003"
    key = f"optim.{UP}.exp_avg/{part}"
    file, start, _ = place_of(copy, key)
    data = bytearray(file.read_bytes())
    data[start] ^= 1
    file.write_bytes(data)

    with pytest.raises(CheckpointCorrupt, match=f"Damaged tensors: {key}"):
        checkpoint.verify(str(copy))


def of_class(kind: str, manifest: Manifest) -> Manifest:
    assert manifest.optimizer is not None
    wrapped = {
        name: {slot: record | {"class": kind} for slot, record in slots.items()}
        for name, slots in manifest.optimizer["wrapped"].items()
    }
    return replace(manifest, optimizer={**manifest.optimizer, "wrapped": wrapped})


def test_a_class_that_a_manifest_names_is_never_imported(
    pools: Any, runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = runs(2, "8bit")
    copy = Path(shutil.copytree(path, tmp_path / "run")) / "step-00000003"
    (tmp_path / "hostile.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass State: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    rewrite_manifest(copy, lambda manifest: of_class("hostile.State", manifest))

    found = pools(2).run(try_in_path, str(tmp_path), "8bit", str(copy.parent))

    assert found[0] == found[1]
    assert found[0]["same"]
    assert "is a hostile.State, which is none of torchao's optimizer states; it is not imported" in found[0]["error"][1]
    assert not (tmp_path / "executed").exists()


def test_state_of_an_optimizer_that_is_gone_is_refused_with_what_there_is(
    pools: Any, runs: Any, tmp_path: Path
) -> None:
    path, _ = runs(2, "8bit")
    copy = Path(shutil.copytree(path, tmp_path / "run")) / "step-00000003"
    gone = {"kind": "holdfast.optim.lowbit.AdamW4bit"}
    rewrite_manifest(copy, lambda manifest: replace(manifest, optimizer={**(manifest.optimizer or {}), **gone}))

    found = pools(2).run(try_to_load, "8bit", str(copy.parent))

    assert found == [found[0]] * 2
    assert found[0]["error"][0] == "CheckpointMismatch"
    assert found[0]["same"]
    for named in ("AdamW4bit", "optim.kind: adamw_8bit", "checkpoint.init_from"):
        assert named in found[0]["error"][1]


def try_in_path(world: World, folder: str, kind: str, run: str) -> dict[str, Any]:
    sys.path.insert(0, folder)
    try:
        return try_to_load(world, kind, run)
    finally:
        sys.path.remove(folder)


def test_a_record_that_does_not_fit_its_tensors_is_damage(pools: Any, runs: Any, tmp_path: Path) -> None:
    path, _ = runs(2, "8bit")
    copy = Path(shutil.copytree(path, tmp_path / "run")) / "step-00000003"
    manifest = parse((copy / NAME).read_bytes(), NAME)
    assert manifest.optimizer is not None
    manifest.optimizer["wrapped"][UP]["exp_avg"]["parts"]["codes"] = [7, 3]
    rewrite_manifest(copy, lambda _: manifest)

    found = pools(2).run(try_to_load, "8bit", str(copy.parent))[0]

    assert found["error"][0] == "CheckpointCorrupt"
    assert f"record of state exp_avg of {UP} does not fit its tensors" in found["error"][1]
    assert found["same"]


def test_commands_show_parts_and_export_them(runs: Any, tmp_path: Path) -> None:
    path, _ = runs(2, "8bit")

    shown = CliRunner().invoke(app, ["checkpoint", "show", f"{path}/step-00000003"])
    exported = CliRunner().invoke(
        app, ["checkpoint", "export", f"{path}/step-00000003", "-o", str(tmp_path / "all.pt"), "--format", "torch"]
    )

    assert shown.exit_code == exported.exit_code == 0
    assert "tensors of its state are torchao.optim.subclass_8bit.OptimState8bit, in parts" in shown.output
    assert f"optim.{UP}.exp_avg/codes uint8 [128, 64]" in shown.output
    state = torch.load(tmp_path / "all.pt")["optimizer"]["state"][UP]["exp_avg"]
    assert state["class"] == "torchao.optim.subclass_8bit.OptimState8bit"
    assert {part: list(value.shape) for part, value in state["parts"].items()} == {
        "codes": [128, 64],
        "scale": [32],
        "qmap": [2, 256],
    }


@pytest.mark.parametrize("call", ["rehearse", "save"])
def test_state_of_any_other_class_is_refused_on_all_ranks(pools: Any, tmp_path: Path, call: str) -> None:
    errors = pools(2).errors(save_it, str(tmp_path), "own", 66, call)

    assert errors == [errors[0]] * 2
    assert errors[0][0] == "UnsavableOptimizer"
    assert f"state 'average' of {UP} is a tests.checkpoint.quantised.Scaled" in errors[0][1]
    assert "none of torchao's optimizer states; its parts would be lost" in errors[0][1]
    assert list(tmp_path.iterdir()) == []


MIXED = [
    (2, "torchao", "UnsavableOptimizer", "sharded so that blocks of its scale do not end where shards do"),  # 64 and 63
    (
        4,
        "4bit",
        "RehearsalFailed",
        "decides by the size of a rank's shard whether it quantises",
    ),  # 32 and 31
]


@pytest.mark.parametrize(("ranks", "kind", "error", "said"), MIXED)
def test_an_optimizer_that_quantises_some_ranks_rows_only_is_refused_before_step_1(
    pools: Any, tmp_path: Path, ranks: int, kind: str, error: str, said: str
) -> None:
    errors = pools(ranks).errors(save_it, str(tmp_path), kind, 127, "rehearse")

    assert errors == [errors[0]] * ranks
    assert errors[0][0] == error
    assert said in errors[0][1]
    assert list(tmp_path.iterdir()) == []


def save_model_of_a_subclass(world: World, run: str) -> None:
    toy = build(world)
    block = toy.language_model.blocks[0]
    block.calls = Scaled.of(torch.ones(3))
    checkpoint.save(f"{run}/step-00000001", toy, optimizer_of(toy), timeout_minutes=1.0)


def test_a_model_s_tensor_of_a_subclass_is_refused_by_name(pools: Any, tmp_path: Path) -> None:
    errors = pools(2).errors(save_model_of_a_subclass, str(tmp_path))

    assert errors[0] == errors[1]
    assert errors[0][0] == "ModelError"
    assert "blocks.0.calls is a tests.checkpoint.quantised.Scaled" in errors[0][1]
    assert list(tmp_path.iterdir()) == []
