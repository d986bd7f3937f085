"""What a run refuses, keeps and counts when something around it is not as it was."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file

from holdfast import checkpoint
from holdfast.checkpoint.errors import CheckpointCorrupt
from holdfast.checkpoint.export.write import check_target
from holdfast.checkpoint.keep import find
from holdfast.checkpoint.keep.retention import read_pins
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.errors import ConfigError
from holdfast.metrics.sink import read_metrics
from holdfast.parallel.mesh import World
from holdfast.training.directory import last_saved
from holdfast.training.observe import load_function
from tests.checkpoint.cases import build, optimizer_of
from tests.training.cases import run, tree


def test_epochs_count_the_rows_that_a_filter_leaves(pools: Any, tmp_path: Path) -> None:
    """Of 40 rows the filter keeps those of even length; each is trained once per pass."""
    (tmp_path / "even.py").write_text("def keep(row):\n    return len(row['completion']) % 2 == 0\n")
    data = {"synthetic": {"task": "sort", "rows": 40}, "batch_size": 4, "filter": "even.py:keep"}
    values = tree(str(tmp_path), epochs=2, data=data, optim={"schedule": "constant"})
    values.pop("steps")

    pools(1).run(run, values, str(tmp_path))

    lines = read_metrics(tmp_path / "r" / "metrics.jsonl")
    kept = sum(line["data/rows"] for line in lines)
    assert lines[-1]["epoch"] == 2.0
    assert 0 < kept < 80
    assert kept + sum(line["data/filtered"] for line in lines if "data/filtered" in line) == 80


def test_a_schedule_ends_with_the_last_row_that_a_filter_leaves(pools: Any, tmp_path: Path) -> None:
    """Of 40 rows some are taken; a line to 0.1 of the peak over their batches, twice, ends at 0.1 of the peak."""
    (tmp_path / "even.py").write_text("def keep(row):\n    return len(row['completion']) % 2 == 0\n")
    data = {"synthetic": {"task": "sort", "rows": 40}, "batch_size": 4, "filter": "even.py:keep"}
    optim = {"lr": 2e-3, "schedule": {"kind": "linear", "final_ratio": 0.1}}
    values = tree(str(tmp_path), epochs=2, data=data, optim=optim)
    values.pop("steps")

    pools(2).run(run, values, str(tmp_path))

    lines = [line for line in read_metrics(tmp_path / "r" / "metrics.jsonl") if "learning_rate" in line]
    steps = len(lines)
    assert 4 < steps < 20
    assert [line["learning_rate"] for line in lines] == pytest.approx(
        [2e-3 * (1 - 0.9 * step / (steps - 1)) for step in range(steps)]
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": {"config_override": {"rms_norm_eps": 0.1}}}, "model: rms_norm_eps 1e-06 -> 0.1"),
        ({"objective": "dft"}, "objective: objective.kind nll -> dft"),
        ({"data": {"average": "sequence_mean"}}, "objective: data.average token_mean -> sequence_mean"),
        ({"data": {"rows": "prompt_completion"}}, "data: data.rows.0 auto -> prompt_completion"),
    ],
    ids=["a number of the model", "the loss", "the average", "the shape of rows"],
)
def test_a_run_does_not_go_on_as_another_run(pools: Any, tmp_path: Path, change: dict[str, Any], named: str) -> None:
    pools(1).run(run, tree(str(tmp_path), steps=2))
    before = (tmp_path / "r" / "config.resolved.yaml").read_text()

    errors = pools(1).errors(run, tree(str(tmp_path), steps=4, **change))

    assert errors[0][0] == "CheckpointMismatch"
    assert f"({named}" in errors[0][1]
    assert (tmp_path / "r" / "config.resolved.yaml").read_text() == before


def test_a_run_whose_checkpoints_were_all_put_aside_is_refused_every_time(pools: Any, tmp_path: Path) -> None:
    pools(1).run(run, tree(str(tmp_path), steps=2))
    for file in (tmp_path / "r" / "checkpoints").glob("step-*/trainer.json"):
        file.write_bytes(b"[" + file.read_bytes()[1:])

    first = pools(1).errors(run, tree(str(tmp_path), steps=4))[0]
    second = pools(1).errors(run, tree(str(tmp_path), steps=4))[0]

    assert first[0] == second[0] == "NoCheckpoint"
    assert "has no whole checkpoint left" in first[1]
    assert "1 were damaged and put aside earlier" in second[1]


def write_plain(world: World, place: str, name: str) -> None:
    """Write a checkpoint as a loop of somebody's own does, without us."""
    torch.distributed.checkpoint.save({"weight": torch.ones(3)}, checkpoint_id=f"{place}/{name}")


def everything(place: Path) -> dict[str, bytes | None]:
    """Return every name below a place, with the bytes of files."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in place.rglob("*")}


FOREIGN = {
    "verl": ("global_step_10/actor/model_world_size_2_rank_0.pt", "a run of verl or EasyR1"),
    "verl's ranks": ("model_world_size_2_rank_0.pt", "a checkpoint of verl or EasyR1"),
    "Lightning": ("epoch=0-step=100.ckpt", "checkpoints of Lightning"),
    "Lightning's shards": ("epoch=0-step=100/meta.pt", "a sharded checkpoint of Lightning"),
    "accelerate": ("checkpoint_0/random_states_0.pkl", "a checkpoint of accelerate"),
    "Trainer": ("checkpoint-500/trainer_state.json", "an output directory of transformers' Trainer"),
    "torchtitan's outputs": ("checkpoint/step-10/.metadata", "an output directory of torchtitan"),
}


@pytest.mark.parametrize("own_place", [False, True], ids=["checkpoint.storage", "the run's own place"])
@pytest.mark.parametrize("name", ["step-00000100", "step-10"])
def test_a_place_of_plain_checkpoints_is_refused_and_left_as_it_is(
    pools: Any, tmp_path: Path, name: str, own_place: bool
) -> None:
    place = tmp_path / "r" / "checkpoints" if own_place else tmp_path / "mine"
    pools(1).run(write_plain, str(place), name)
    before = everything(tmp_path)
    storage = {} if own_place else {"checkpoint": {"storage": str(place)}}

    errors = pools(2).errors(run, tree(str(tmp_path), steps=4, **storage))

    assert errors[0] == errors[1]
    assert errors[0][0] == "ConfigError"
    assert "holds checkpoints that Holdfast did not write: it is a plain DCP directory (torchtitan" in errors[0][1]
    assert everything(tmp_path) == before


@pytest.mark.parametrize("system", FOREIGN)
def test_a_place_of_another_system_is_refused_by_its_name(pools: Any, tmp_path: Path, system: str) -> None:
    file, words = FOREIGN[system]
    place = tmp_path / "mine"
    (place / file).parent.mkdir(parents=True)
    for name in (file, f"{Path(file).parent}/.metadata"):
        (place / name).write_bytes(b"x")
    before = everything(tmp_path)

    errors = pools(1).errors(run, tree(str(tmp_path), steps=4, checkpoint={"storage": str(place)}))

    assert errors[0][0] == "ConfigError"
    assert words in errors[0][1]
    assert everything(tmp_path) == before


def test_checkpoints_of_others_beside_a_run_s_own_are_left_alone(pools: Any, tmp_path: Path) -> None:
    place = tmp_path / "mine"
    values = {"checkpoint": {"storage": str(place), "every_steps": 2, "keep": {"last": 2}}}
    pools(1).run(run, tree(str(tmp_path), steps=2, **values))
    for name in ("step-00000001", "step-10", "step-00000100"):
        pools(1).run(write_plain, str(place), name)
    theirs = {name: data for name, data in everything(place).items() if "step-00000002" not in name}

    outcome = pools(1).run(run, tree(str(tmp_path), steps=6, **values))[0]
    errors = pools(2).errors(run, tree(str(tmp_path), steps=100, **values))

    assert outcome.step == 6
    after = everything(place)
    assert {name: after.get(name) for name in theirs if ".lease" not in name} == {
        name: data for name, data in theirs.items() if ".lease" not in name
    }
    assert errors[0] == errors[1]
    assert errors[0][0] == "ConfigError"
    assert "step-00000100 is no checkpoint: it has no manifest.json" in errors[0][1]
    assert "a save of step 100 would find its name taken" in errors[0][1]


@pytest.mark.cases(1)
@pytest.mark.parametrize("ema", [None, {"decay": 0.9, "evaluate": True}])
def test_an_error_in_an_evaluation_costs_no_step(pools: Any, tmp_path: Path, ema: dict[str, Any] | None) -> None:
    rows = [{"prompt": "a=", "completion": "b"}] * 16 + [{"prompt": "a="}]  # behind the first batch
    (tmp_path / "bad.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    evaluation = {"sets": {"bad": {"path": "bad.jsonl"}}, "every_steps": 3}

    values = tree(str(tmp_path), steps=5, evaluation=evaluation, optim={"ema": ema})
    errors = pools(2).errors(run, values, str(tmp_path))

    assert errors[0] == errors[1]
    assert errors[0][0] == "DataError"
    assert find.one(str(tmp_path / "r")).manifest.step == 3
    assert last_saved(tmp_path / "r") == 3


STANDS_IN_THE_WAY = """
def in_the_way(event):
    import pathlib
    if event.step == 1:
        place = pathlib.Path({place!r})
        place.parent.mkdir(exist_ok=True)
        place.write_text("a file")
"""


def test_a_best_export_that_failed_is_no_best_one(pools: Any, tmp_path: Path) -> None:
    """The metric falls from the first step on, so a run that believed in the first export would never make another."""
    place = tmp_path / "r" / "exports" / "best"
    (tmp_path / "watch.py").write_text(STANDS_IN_THE_WAY.format(place=str(place)))
    best = {"every_steps": 1, "export_best": {"metric": "learning_rate", "mode": "max"}, "export_at_end": False}
    values = tree(str(tmp_path), steps=4, optim={"schedule": "linear"}, checkpoint=best)
    values["observers"] = ["watch.py:in_the_way"]

    errors = pools(2).errors(run, values, str(tmp_path))
    stopped = find.one(str(tmp_path / "r")).manifest.step
    place.unlink()
    pools(2).run(run, values, str(tmp_path))

    assert errors[0] == errors[1]
    assert "cannot be replaced by an export" in errors[0][1]
    assert stopped == 1
    exported = load_file(place / "model.safetensors")
    second = find.one(str(tmp_path / "r" / "checkpoints" / "step-00000002"))
    assert all(torch.equal(tensor, second.read(f"model.{name}")) for name, tensor in exported.items())


@pytest.mark.slow
def test_a_best_export_of_steps_that_were_lost_is_replaced_by_a_better_one_alone(pools: Any, tmp_path: Path) -> None:
    """The rate rises to 0.003 at step 3, which no checkpoint holds; the second start comes to 0.0024 there."""
    best = {"metric": "learning_rate", "mode": "max"}
    saves = {"every_steps": 2, "at_end": False, "export_best": best, "export_at_end": False}
    schedule = {"kind": "constant", "warmup_steps": 3}
    place = tmp_path / "r/exports/best"

    def train(steps: int, rate: float) -> tuple[float, int, str]:
        optim = {"lr": rate, "schedule": schedule}
        pools(2).run(run, tree(str(tmp_path), steps=steps, optim=optim, checkpoint=saves))
        about = json.loads((place / "holdfast_export.json").read_text())
        return (
            about["rating"]["value"],
            about["step"],
            hashlib.sha256((place / "model.safetensors").read_bytes()).hexdigest(),
        )

    first, second, third = train(3, 0.003), train(4, 0.0024), train(6, 0.0036)

    assert first[:2] == (0.003, 3)
    assert second == first
    assert third[:2] == (0.0036, 5)


def test_the_last_checkpoint_has_the_evaluation_of_the_end(pools: Any, tmp_path: Path) -> None:
    evaluation = {"sets": {"held": {"synthetic": {"task": "sort", "rows": 8, "seed": 3}}}}
    best = {"metric": "eval/held/loss", "mode": "min"}

    pools(1).run(
        run, tree(str(tmp_path), steps=4, evaluation=evaluation, checkpoint={"every_steps": 2, "export_best": best})
    )

    found = find.one(str(tmp_path / "r")).manifest
    assert found.step == 4
    assert found.metrics["eval/held/loss"] == read_metrics(tmp_path / "r" / "metrics.jsonl")[-1]["eval/held/loss"]
    assert (tmp_path / "r" / "exports" / "best" / "model.safetensors").exists()


def test_an_export_replaces_exports_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "holdfast.yaml").write_text("")

    with pytest.raises(ConfigError, match="holds other things than an export, which would be deleted"):
        check_target(tmp_path / "thesis")
    check_target(tmp_path / "export")
    check_target(tmp_path / "new")

    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


def test_damaged_pins_are_named(tmp_path: Path) -> None:
    (tmp_path / "pins.json").write_text("[1, 2")

    with pytest.raises(CheckpointCorrupt, match=r"pins\.json is damaged .* Delete it"):
        read_pins(LocalStorage(tmp_path))


def test_a_users_dataclass_with_lazy_annotations_is_imported(tmp_path: Path) -> None:
    lines = ["from __future__ import annotations", "from dataclasses import dataclass", "@dataclass", "class Loss:"]
    (tmp_path / "loss.py").write_text("\n".join([*lines, "    x: int = 3", ""]))

    assert load_function("loss.py:Loss", tmp_path, "objective.path")().x == 3


def rehearse_with_scheduler(world: World, path: str) -> tuple[bool, int, list[float]]:
    """Rehearse with a scheduler attached; return whether weights moved, entries of state, and rehearsed moments."""
    toy = build(world)
    optimizer = optimizer_of(toy)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    toy(torch.ones(2, 5)).sum().backward()
    before = [parameter.detach().clone() for parameter in toy.parameters()]
    report = checkpoint.rehearse(path, toy, optimizer)
    moved = any(not torch.equal(was, now.detach()) for was, now in zip(before, toy.parameters(), strict=True))
    return moved, len(optimizer.state), [float(name.endswith(".exp_avg")) for name in report.outline]


def test_a_rehearsal_with_a_scheduler_attached_makes_no_step_and_rehearses_the_moments(
    pools: Any, tmp_path: Path
) -> None:
    moved, states, moments = pools(2).run(rehearse_with_scheduler, str(tmp_path / "run"))[0]

    assert not moved
    assert states == 0
    assert sum(moments) == 8  # four trained parameters in each of two blocks
