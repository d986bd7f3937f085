"""What a resume was allowed to change stands in every later checkpoint of the run."""

from __future__ import annotations

import contextlib
import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import checkpoint
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.shards import shard_file
from holdfast.checkpoint.keep import find
from holdfast.parallel.mesh import World
from tests.checkpoint.damage import rewrite_manifest
from tests.crash.runs import log_of, state_differences, values_of
from tests.training.cases import run


def test_an_unfrozen_parameter_is_recorded_in_the_next_manifest(pools: Any, tmp_path: Path) -> None:
    frozen = {"model": {"freeze": [r"layers\.0\."]}}
    declared = {"resume": {"unfreeze": [r"layers\.0\."]}}
    pools(2).run(run, values_of(tmp_path, steps=2, **frozen))
    assert find.one(str(tmp_path / "r")).manifest.deviations == ()

    pools(2).run(run, values_of(tmp_path, steps=4, checkpoint=declared))

    manifest = find.one(str(tmp_path / "r")).manifest
    assert manifest.step == 4
    recorded = str(manifest.deviations)
    assert "unfreeze" in recorded
    assert "layers.0.self_attn.q_proj.weight" in recorded
    assert "layers.1" not in recorded


def printed(world: World, values: dict[str, Any]) -> str:
    """Run, and return what was printed."""
    with contextlib.redirect_stdout(io.StringIO()) as lines:
        run(world, values)
    return lines.getvalue()


@pytest.mark.slow
def test_what_was_once_declared_stands_in_all_later_manifests(pools: Any, tmp_path: Path) -> None:
    frozen: dict[str, Any] = {"model": {"freeze": [r"layers\.0\."]}}
    few: dict[str, Any] = {"keep": {"last": 2}}
    resume: dict[str, Any] = {"unfreeze": [r"layers\.0\."], "changed": ["objective"]}
    averaged: dict[str, Any] = {"data": {"average": "sequence_mean"}}
    pools(2).run(run, values_of(tmp_path, steps=2, checkpoint=few, **frozen))

    told = pools(2).run(printed, values_of(tmp_path, steps=4, checkpoint=few | {"resume": resume}, **averaged))
    first = find.one(str(tmp_path / "r")).manifest.deviations
    again = pools(2).run(printed, values_of(tmp_path, steps=6, checkpoint=few | {"resume": resume}, **averaged))
    pools(2).run(run, values_of(tmp_path, steps=10, checkpoint=few, **averaged))
    pools(2).run(run, values_of(tmp_path, steps=14, checkpoint=few | {"resume": {"changed": ["objective"]}}))

    assert first[0] == "objective: data.average token_mean -> sequence_mean (changed)"
    assert f"\n{first[0]}\n" in told[0]
    assert len(first) > 1
    assert all("layers.0." in line and "unfreeze" in line for line in first[1:])
    assert all(line not in again[0] for line in first)
    last = find.one(str(tmp_path / "r"))
    assert last.manifest.step == 14
    assert last.manifest.deviations == (*first, "objective: data.average sequence_mean -> token_mean (changed)")


def test_a_new_run_begins_with_the_weights_of_another_and_remembers_which_and_what_was_declared(
    pools: Any, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    pools(2).run(run, values_of(first, steps=2, model={"freeze": [r"layers\.0\."]}))
    source = find.one(str(first / "r"))
    start: dict[str, Any] = {"init_from": source.path, "resume": {"unfreeze": [r"layers\.0\."]}}
    still: dict[str, Any] = {"optim": {"lr": 1e-30, "schedule": "constant"}}

    told = pools(1).run(printed, values_of(second, steps=1, checkpoint=start, **still))
    pools(1).run(run, values_of(second, steps=2, checkpoint=start, **still))

    assert f"weights from {source.path} (step 2); a new run starts at step 0" in told[0]
    begun = find.one(str(second / "r"))
    weights = [name for name in source.manifest.tensors if name.startswith("model.")]
    assert weights == [name for name in begun.manifest.tensors if name.startswith("model.")]
    assert all(torch.equal(begun.read(name), source.read(name)) for name in weights)
    recorded = begun.manifest.deviations
    assert (begun.manifest.step, recorded[0]) == (2, f"weights from {source.path} ({source.manifest.hash})")
    assert len(recorded) > 1
    assert all("layers.0." in line and "unfreeze" in line for line in recorded[1:])


@pytest.mark.slow
def test_checkpoints_of_a_run_of_another_name_are_not_gone_on_from_in_silence(pools: Any, tmp_path: Path) -> None:
    store: dict[str, Any] = {"storage": str(tmp_path / "store")}
    pools(2).run(run, values_of(tmp_path / "here", steps=2, checkpoint=store))
    other = values_of(tmp_path / "here", steps=4, checkpoint=store, run={"name": "other"})

    errors = pools(2).errors(run, other)

    assert errors[0] == errors[1]
    assert errors[0][0] == "CheckpointMismatch"
    assert "(run: run.name is r there)" in errors[0][1]
    assert not (tmp_path / "here" / "other").exists()
    # The same name on a machine whose disk is new is the same run.
    assert pools(2).run(run, values_of(tmp_path / "there", steps=4, checkpoint=store))[0].step == 4
    declared = values_of(
        tmp_path / "here", steps=6, checkpoint=store | {"resume": {"changed": ["run"]}}, run={"name": "other"}
    )
    assert pools(2).run(run, declared)[0].step == 6
    manifest = find.one(str(tmp_path / "store")).manifest
    assert (manifest.step, manifest.deviations) == (6, ("run: run.name is r there (changed)",))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damaged", [("4",), ("2", "4")], ids=["the newest is damaged", "all are damaged"])
@pytest.mark.cases(1)
def test_of_another_run_s_checkpoints_nothing_is_renamed(pools: Any, tmp_path: Path, damaged: tuple[str, ...]) -> None:
    store: dict[str, Any] = {"storage": str(tmp_path / "store")}
    pools(2).run(run, values_of(tmp_path / "here", steps=4, checkpoint=store))
    for step in damaged:
        flip(tmp_path / "store" / f"step-0000000{step}" / shard_file(1))
    (tmp_path / "store" / ".staging-step-00000006-12345678").mkdir()
    before = times_of(tmp_path / "store")

    errors = pools(2).errors(run, values_of(tmp_path / "here", steps=6, checkpoint=store, run={"name": "other"}))

    assert errors[0] == errors[1]
    assert errors[0][0] == "CheckpointMismatch"
    assert "(run: run.name is r there). Nothing was changed." in errors[0][1]
    assert times_of(tmp_path / "store") == before
    assert not (tmp_path / "here" / "other").exists()


def times_of(place: Path) -> dict[Path, int]:
    """Return when each file of a place was written, but for its lease."""
    return {path: path.stat().st_mtime_ns for path in place.rglob("*") if not path.name.startswith(".lease-")}


def forged(saved: Path) -> None:
    """Let the manifest say that the last trained tensor was another one: what memory that erred in a save leaves."""

    def change(manifest: Manifest) -> Manifest:
        key = max(name for name in manifest.tensors if name.startswith("model."))
        entry = manifest.tensors[key]
        chunks = (*entry.chunks[:-1], replace(entry.chunks[-1], hash="0" * 32))
        return replace(manifest, tensors={**manifest.tensors, key: replace(entry, chunks=chunks)})

    rewrite_manifest(saved, change)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_whose_tensors_are_not_what_was_saved_is_passed_over(
    pools: Any, tmp_path: Path, ranks: int
) -> None:
    later: dict[str, Any] = {
        "optim": {"lr": 2e-3, "schedule": "constant", "ema": {"decay": 0.9}},
    }
    pools(2).run(run, values_of(tmp_path / "one", steps=4, **later))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    shutil.rmtree(tmp_path / "two" / "r" / "checkpoints" / "step-00000004")
    forged(tmp_path / "one" / "r" / "checkpoints" / "step-00000004")
    checkpoint.verify(str(tmp_path / "one" / "r" / "checkpoints" / "step-00000004"), "files")

    told = pools(ranks).run(printed, values_of(tmp_path / "one", steps=6, **later))[0]
    pools(ranks).run(run, values_of(tmp_path / "two", steps=6, **later))

    assert "resuming from step 2, verified in" in told
    assert "skipped step 4 (model." in told
    assert "reads back differently from what was saved" in told
    names = sorted(path.name for path in (tmp_path / "one" / "r" / "checkpoints").iterdir())
    assert [name[: len(".quarantine-step-00000004")] for name in names if name.startswith(".q")] == [
        ".quarantine-step-00000004"
    ]
    assert log_of(tmp_path / "one") == log_of(tmp_path / "two")
    assert state_differences(tmp_path / "one", tmp_path / "two") == []


@pytest.mark.cases(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_where_no_checkpoint_s_tensors_fit_nothing_is_renamed(pools: Any, tmp_path: Path, ranks: int) -> None:
    """It may be the reader that is wrong, or memory that is short: the next start shall find them all."""
    pools(2).run(run, values_of(tmp_path, steps=4))
    place = tmp_path / "r" / "checkpoints"
    steps = sorted(path.name for path in place.glob("step-*"))
    for name in steps:
        forged(place / name)

    errors = pools(ranks).errors(run, values_of(tmp_path, steps=6))

    assert {error[0] for error in errors} == {"NoCheckpoint"}
    assert len(steps) >= 2
    assert sorted(path.name for path in place.iterdir() if not path.name.startswith(".lease-")) == steps
