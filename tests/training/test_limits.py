"""How long a run is, and what a dry run leaves behind: nothing."""

from __future__ import annotations

import hashlib
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.load import from_mapping
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import SFTConfig, end_of_both
from holdfast.metrics.sink import read_metrics
from holdfast.parallel.mesh import World
from holdfast.recipes.grpo import grpo
from tests.training.cases import run, tree


def test_min_steps_outranks_the_clock(pools: Any, tmp_path: Path) -> None:
    values = tree(str(tmp_path), max_minutes=0.0001, min_steps=7, steps=1000)

    outcomes = pools(2).run(run, values)

    assert [(outcome.step, outcome.stopped) for outcome in outcomes] == [(7, "max_minutes=0.0001 have passed")] * 2
    assert [line["step"] for line in read_metrics(tmp_path / "r" / "metrics.jsonl")] == list(range(1, 8))


@pytest.mark.parametrize(("min_steps", "evaluated"), [(0, 0), (1, 1)])
@pytest.mark.cases(1)
def test_an_evaluation_is_left_when_the_clock_runs_out(
    pools: Any, tmp_path: Path, min_steps: int, evaluated: int
) -> None:
    """The clock is over before the evaluation at the start; it counts once `min_steps` are done."""
    evaluation = {"sets": {"held": {"synthetic": {"task": "sort", "rows": 40, "seed": 9}}}, "at_start": True}
    values = tree(str(tmp_path), max_minutes=1e-6, min_steps=min_steps, steps=1000, evaluation=evaluation)

    outcomes = pools(2).run(run, values)

    assert [(outcome.step, outcome.stopped) for outcome in outcomes] == [(1, "max_minutes=1e-06 have passed")] * 2
    lines = (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    assert sum("eval/held/loss" in line for line in lines) == evaluated


def run_policy(world: World, values: dict[str, Any]) -> Any:
    return grpo(from_mapping(values, GRPOConfig), Path(), world)


@pytest.mark.parametrize("min_steps", [0, 2])
@pytest.mark.cases(1)
def test_a_rollout_is_left_when_the_clock_runs_out(pools: Any, tmp_path: Path, min_steps: int) -> None:
    values = tree(
        str(tmp_path),
        max_minutes=1e-6,
        min_steps=min_steps,
        steps=1000,
        data={"synthetic": {"task": "reverse", "rows": 64}, "batch_size": 4},
        rollout={"group_size": 2, "max_new_tokens": 4, "show": 0},
        reward="exact",
    )

    outcomes = pools(2).run(run_policy, values)

    lost = " before this start had made a step; the next one makes none either unless it is longer"
    ended = (min_steps, "max_minutes=1e-06 have passed" + (lost if min_steps == 0 else ""))
    assert [(outcome.step, outcome.stopped) for outcome in outcomes] == [ended] * 2


def heard(world: World, values: dict[str, Any]) -> tuple[int, list[str]]:
    """Run, and return the last step and what was printed."""
    with redirect_stdout(StringIO()) as printed:
        outcome = run(world, values)
    return outcome.step, printed.getvalue().splitlines()


def test_steps_and_epochs_together_end_at_whichever_comes_first(pools: Any, tmp_path: Path) -> None:
    """200 rows in batches of 16 are 13 batches."""
    (by_steps,) = pools(1).run(heard, tree(str(tmp_path / "a"), steps=5, epochs=1))
    (by_epochs,) = pools(1).run(heard, tree(str(tmp_path / "b"), steps=50, epochs=1))

    assert (by_steps[0], by_epochs[0]) == (5, 13)
    assert (
        "steps=5 ends the run, before epochs=1: those are 13 steps; steps=null would leave epochs alone" in by_steps[1]
    )
    assert (
        "epochs=1 ends the run, before steps=50: 13 steps at most; epochs=null would leave steps alone" in by_epochs[1]
    )


@pytest.mark.parametrize(
    ("limits", "batches", "said"),
    [
        ({"steps": 5}, 13, ""),
        ({"epochs": 1}, 13, ""),
        ({"steps": 13, "epochs": 1}, 13, ""),
        ({"steps": 5, "epochs": 1, "dry_run": True}, 13, ""),
        ({"steps": 5, "epochs": 1}, None, "steps=5 and epochs=1 are set: the run ends at whichever comes first"),
    ],
)
def test_which_of_two_ends_comes_first_is_told_where_it_is_a_question(
    tmp_path: Path, limits: dict[str, Any], batches: int | None, said: str
) -> None:
    config = from_mapping({**tree(str(tmp_path)), "steps": None} | limits, SFTConfig)

    assert end_of_both(config, batches) == said


def fingerprints(directory: Path) -> dict[str, str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_dry_run_leaves_a_real_run_of_its_name_as_it_was(pools: Any, tmp_path: Path) -> None:
    pools(2).run(run, tree(str(tmp_path)))
    before = fingerprints(tmp_path)

    outcome = pools(2).run(run, tree(str(tmp_path), dry_run=True))[0]

    assert outcome.step == 2
    assert len(before) > 5
    assert fingerprints(tmp_path) == before


def test_a_dry_run_that_fails_leaves_nothing(pools: Any, tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text("def no(event, state):\n    raise ValueError('no')\n")

    errors = pools(2).errors(run, tree(str(tmp_path / "runs"), dry_run=True, observers=["watch.py:no"]), str(tmp_path))

    assert "no" in errors[0][1]
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
def test_a_dry_run_leaves_the_place_of_a_real_run_s_checkpoints_alone(pools: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    values = tree(str(tmp_path / "runs"), checkpoint={"storage": str(store)})

    dry = pools(2).run(run, values | {"dry_run": True})[0]
    left = store.exists()
    real = pools(2).run(run, values)[0]

    assert (dry.step, left, real.step) == (2, False, 4)
    lines = read_metrics(tmp_path / "runs" / "r" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert (store / "step-00000004").is_dir()


def test_overfitting_one_batch_repeats_its_loss_where_nothing_is_learned(pools: Any, tmp_path: Path) -> None:
    """At a rate of almost nothing the loss of a step says which rows it held."""
    optim = {"lr": 1e-12, "schedule": "constant"}
    values = tree(str(tmp_path), overfit_batches=2, steps=6, optim=optim, model={"dtype": "float64"})

    pools(2).run(run, values)

    losses = [line["loss"] for line in read_metrics(tmp_path / "r" / "metrics.jsonl")]
    assert losses[2:] == pytest.approx(losses[:2] * 2, rel=1e-9)
    assert abs(losses[0] - losses[1]) > 1e-3
