"""A new run from a checkpoint takes its weights, its moments, or its schedule too, and never its place in the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.keep import find
from tests.crash.runs import log_of, values_of
from tests.training.cases import run

EXACT: dict[str, Any] = {
    "dropout": False,
    "model": {"dtype": "float64"},
    # One batch holds all rows, so that the place in the data moves no number.
    "data": {"synthetic": {"task": "sort", "rows": 16}, "batch_size": 16},
    "optim": {"lr": 2e-3, "schedule": {"kind": "cosine", "warmup_steps": 2}},
}
STEPS, FIRST = 8, 4


@pytest.fixture(scope="module")
def straight(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run of eight steps with a checkpoint of every second."""
    directory = tmp_path_factory.mktemp("straight")
    pools(2).run(run, values_of(directory, steps=STEPS, **EXACT))
    return directory


def begun(pools: Any, straight: Path, directory: Path, take: str, ranks: int = 2) -> list[tuple[Any, ...]]:
    """Return the lines of a run that starts from the fourth step of another."""
    start = {"path": str(straight / "r" / "checkpoints" / f"step-{FIRST:08d}"), "take": take}
    pools(ranks).run(run, values_of(directory, steps=STEPS - FIRST, checkpoint={"init_from": start}, **EXACT))
    return log_of(directory)


@pytest.mark.parametrize("ranks", [2, 1])
def test_a_phase_with_moments_and_schedule_makes_the_updates_of_the_straight_run(
    pools: Any, straight: Path, tmp_path: Path, ranks: int
) -> None:
    phase, whole = begun(pools, straight, tmp_path, "weights+moments+schedule", ranks), log_of(straight)[FIRST:]

    assert [line[0] for line in phase] == [1, 2, 3, 4]
    for column in (1, 2, 4):  # loss, gradient norm, learning rate
        assert [line[column] for line in phase] == pytest.approx([line[column] for line in whole], rel=1e-9)
    ours, theirs = find.one(str(tmp_path / "r")), find.one(str(straight / "r"))
    for name in theirs.manifest.tensors:
        assert (ours.read(name) - theirs.read(name)).abs().max() < 1e-9


def test_a_phase_goes_on_with_its_schedule_after_a_resume(pools: Any, straight: Path, tmp_path: Path) -> None:
    start = {"path": str(straight / "r" / "checkpoints" / f"step-{FIRST:08d}"), "take": "weights+moments+schedule"}
    settings: dict[str, Any] = {"checkpoint": {"init_from": start}, **EXACT}
    pools(2).run(run, values_of(tmp_path, steps=2, **settings))

    pools(2).run(run, values_of(tmp_path, steps=4, **settings))

    # The first two belong to a schedule that ended with them.
    assert [line[4] for line in log_of(tmp_path)[2:]] == pytest.approx([line[4] for line in log_of(straight)[6:]])


def test_moments_alone_start_the_schedule_anew(pools: Any, straight: Path, tmp_path: Path) -> None:
    phase = begun(pools, straight, tmp_path, "weights+moments")

    rates = [line[4] for line in phase]
    assert rates[:2] == pytest.approx([1e-3, 2e-3])
    moved = find.one(str(tmp_path / "r")).manifest.tensors
    steps = [name for name in moved if name.endswith(".step")]
    assert steps
    assert {float(find.one(str(tmp_path / "r")).read(name)) for name in steps} == {float(STEPS)}


def test_weights_alone_start_moments_and_schedule_anew(pools: Any, straight: Path, tmp_path: Path) -> None:
    phase = begun(pools, straight, tmp_path, "weights")

    assert phase[0][1] == pytest.approx(log_of(straight)[FIRST][1], rel=1e-9)
    assert phase[0][4] == pytest.approx(1e-3)
    last = find.one(str(tmp_path / "r"))
    assert {float(last.read(name)) for name in last.manifest.tensors if name.endswith(".step")} == {4.0}
    assert phase[2][1] != pytest.approx(log_of(straight)[FIRST + 2][1], rel=1e-6)


@pytest.mark.parametrize("take", ["weights+moments", "weights+moments+schedule"])
@pytest.mark.parametrize(
    ("changed", "named"),
    [({"optim": {"kind": "sgd", "lr": 0.1}}, "torch.optim.sgd.SGD"), ({"source": "weights"}, "no optimizer state")],
    ids=["another optimizer", "no moments"],
)
def test_moments_that_a_checkpoint_has_not_are_refused_on_all_ranks(  # noqa: PLR0913
    pools: Any, straight: Path, tmp_path: Path, take: str, changed: dict[str, Any], named: str
) -> None:
    place, settings = straight, EXACT | {name: value for name, value in changed.items() if name != "source"}
    if "source" in changed:
        place = tmp_path / "source"
        pools(2).run(run, values_of(place, steps=4, checkpoint={"contents": "weights"}, **EXACT))
    start = {"path": str(place / "r" / "checkpoints" / "step-00000004"), "take": take}

    errors = pools(2).errors(run, values_of(tmp_path / "new", steps=2, checkpoint={"init_from": start}, **settings))

    assert errors[0] == errors[1]
    assert errors[0][0] == "CheckpointMismatch"
    assert named in errors[0][1]
    assert "take: weights" in errors[0][1]
    assert not (tmp_path / "new" / "r").exists()
