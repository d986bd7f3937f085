"""A checkpoint with NaN in it is no good one: passed over with words, unless it is asked for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast import checkpoint
from holdfast.checkpoint.errors import NoCheckpoint
from holdfast.checkpoint.keep import find
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.cli.main import app
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build, newest_whole, optimizer_of


def save_and_spoil(world: World, run: str) -> None:
    """Save steps 1 and 2, and steps 3 and 4 with NaN in one weight of one rank's."""
    toy = build(world)
    for number in (1, 2, 3, 4):
        if number == 3 and world.rank == 1:
            toy.language_model.blocks[0].trained.weight.data.to_local()[0, 0] = float("nan")  # type: ignore[union-attr, operator]
        checkpoint.save(f"{run}/step-0000000{number}", toy, optimizer_of(toy))


@pytest.fixture(scope="module")
def saved(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("saved")
    pools(2).run(save_and_spoil, str(run))
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "r"))


def choose(world: World, run: str, not_finite: bool) -> tuple[str, str]:
    choice = newest_whole(LocalStorage(Path(run)), RankGroup(), not_finite=not_finite)
    return ("", "") if choice is None else (choice.name, choice.message)


def names_in(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def test_a_run_continues_from_the_newest_finite_one_and_says_what_it_passed_over(pools: Any, run: Path) -> None:
    found = pools(2).run(choose, str(run), False)

    assert found[0] == found[1]
    name, words = found[0]
    assert name == "step-00000002"
    assert words.startswith("resuming from step 2, verified in 5 files; skipped step 4 (a tensor in it holds NaN or")
    assert "step 3 (a tensor in it holds NaN or infinity; it was put aside as .quarantine-not-finite-" in words
    assert "set checkpoint.resume.not_finite: true" in words
    aside = names_in(run)
    assert [name[:-9] for name in aside[:2]] == [f".quarantine-not-finite-step-0000000{step}" for step in (3, 4)]
    assert aside[2:] == ["step-00000001", "step-00000002"]


def test_one_that_is_not_finite_is_taken_if_it_is_asked_for(pools: Any, run: Path) -> None:
    found = pools(2).run(choose, str(run), True)

    words = "resuming from step 4, verified in 5 files; a tensor in it holds NaN or infinity"
    assert found == [("step-00000004", words)] * 2
    assert names_in(run) == [f"step-0000000{step}" for step in (1, 2, 3, 4)]


def test_where_none_is_finite_a_run_neither_continues_nor_starts_again(pools: Any, run: Path) -> None:
    for step in (1, 2):
        shutil.rmtree(run / f"step-0000000{step}")

    errors = pools(2).errors(choose, str(run), False)

    assert errors[0] == errors[1]
    assert errors[0][0] == NoCheckpoint.__name__
    assert "step 4 (a tensor in it holds NaN or infinity)" in errors[0][1]
    assert "set checkpoint.resume.not_finite: true" in errors[0][1]
    assert names_in(run) == ["step-00000003", "step-00000004"]


def test_the_last_one_that_scripts_get_is_finite_and_the_rest_is_said_beside(run: Path) -> None:
    told = CliRunner().invoke(app, ["checkpoint", "path", str(run), "--last"])

    assert told.exit_code == 0
    assert told.stdout == f"{run}/step-00000002\n"
    assert "step 4 is newer, and a tensor in it holds NaN or infinity" in told.stderr
    assert find.one(str(run)).name == "step-00000002"
    assert find.one(str(run / "step-00000004")).manifest.finite is False


def test_the_last_one_is_named_all_the_same_where_none_is_finite(run: Path) -> None:
    for step in (1, 2):
        shutil.rmtree(run / f"step-0000000{step}")

    assert find.one(str(run)).name == "step-00000004"
