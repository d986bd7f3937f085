"""Whatever stands in a checkpoint or beside it: named, put aside or refused, never waited for and never used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import verify
from holdfast.checkpoint.errors import CheckpointCorrupt, NoCheckpoint
from holdfast.parallel.mesh import World
from tests.checkpoint.mutations import mutate
from tests.crash.runs import log_of, saved_steps, values_of
from tests.training.cases import run

NEWEST = "step-00000004"
LOOKS, RESUMES = 42, 6
MANY_LOOKS, MANY_RESUMES = 300, 60
PATIENCE_SECONDS = 90.0


@pytest.fixture(scope="module")
def ended(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the place of a run that stopped at step 4 and has two checkpoints; nobody changes it."""
    place = tmp_path_factory.mktemp("ended")
    pools(1).run(run, values_of(place, steps=4))
    assert saved_steps(place) == [2, 4]
    return place


@pytest.fixture(scope="module")
def straight(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """Return the log of the same run without a stop."""
    place = tmp_path_factory.mktemp("straight")
    pools(1).run(run, values_of(place, steps=5))
    return log_of(place)


def looked_at(_: World, ended: str, places: str, numbers: list[int]) -> list[tuple[str, str, str]]:
    """Damage a copy in each of these ways and verify it; return what was done, and the error with its message."""
    found = []
    for number in numbers:
        place = Path(shutil.copytree(ended, Path(places) / str(number), symlinks=True))
        newest = place / "r/checkpoints" / NEWEST
        done = mutate(newest, number)
        try:
            verify(str(newest))
            found.append((done, "nothing", ""))
        except Exception as error:  # noqa: BLE001 - which one it is, is the question
            found.append((done, type(error).__name__, str(error)))
    return found


@pytest.mark.parametrize("count", [LOOKS, pytest.param(MANY_LOOKS, marks=pytest.mark.slow)])
def test_every_mutation_of_a_checkpoint_is_named_by_verify(pools: Any, ended: Path, tmp_path: Path, count: int) -> None:
    (found,) = pools(1).run(looked_at, str(ended), str(tmp_path), list(range(count)), timeout_seconds=4.0 * count)

    assert len(found) == count
    assert [each for each in found if each[1] not in {"CheckpointCorrupt", "NoCheckpoint"}] == []
    assert [each for each in found if NEWEST not in each[2]] == []


@pytest.mark.parametrize("count", [RESUMES, pytest.param(MANY_RESUMES, marks=pytest.mark.slow)])
def test_a_resume_puts_a_mutated_checkpoint_aside_by_name_and_makes_its_steps_again(
    pools: Any, ended: Path, straight: list[tuple[Any, ...]], tmp_path: Path, count: int
) -> None:
    """Only what lost its manifest is none of ours: it is refused by name, and left where it is."""
    for number in range(0, 7 * count, 7) if count == RESUMES else range(count):
        place = Path(shutil.copytree(ended, tmp_path / str(number), symlinks=True))
        done = mutate(place / "r/checkpoints" / NEWEST, number)

        ((whole, outcome),) = pools(1).outcomes(
            run, values_of(place, steps=5), str(place), timeout_seconds=PATIENCE_SECONDS
        )

        if not whole:
            assert outcome[0] == "ConfigError", (done, outcome)
            assert "manifest.json" in done, (done, outcome)
            assert f"{NEWEST} is no checkpoint: it has no manifest.json" in outcome[1], (done, outcome)
            continue
        aside = [path.name for path in (place / "r/checkpoints").glob(f".quarantine-{NEWEST}-*")]
        assert len(aside) == 1, done
        assert log_of(place) == straight, done
        verify(str(place / "r/checkpoints/step-00000005"))


CONFIGURATION = "assets/holdfast.yaml"


def pipe_as_configuration(place: Path, steps: list[int]) -> None:
    """Put a pipe in the place of the configuration in some checkpoints."""
    for step in steps:
        file = place / f"r/checkpoints/step-{step:08d}" / CONFIGURATION
        file.unlink()
        os.mkfifo(file)


def test_a_pipe_as_the_configuration_of_the_newest_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(
    pools: Any, ended: Path, straight: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    place = Path(shutil.copytree(ended, tmp_path / "place"))
    pipe_as_configuration(place, [4])

    ((_, printed),) = pools(1).run(run_and_listen, values_of(place, steps=5), timeout_seconds=PATIENCE_SECONDS)

    assert f"skipped step 4 ({CONFIGURATION} is no file: it is a pipe)" in printed
    assert log_of(place) == straight


def test_a_run_all_of_whose_configurations_are_pipes_is_refused_with_their_paths(
    pools: Any, ended: Path, tmp_path: Path
) -> None:
    place = Path(shutil.copytree(ended, tmp_path / "place"))
    pipe_as_configuration(place, [2, 4])

    errors = pools(1).errors(run, values_of(place, steps=5), timeout_seconds=PATIENCE_SECONDS)

    assert errors[0][0] == NoCheckpoint.__name__
    for step in (2, 4):
        assert f"step {step} ({CONFIGURATION} is no file: it is a pipe" in errors[0][1]
    assert str(place / "r/checkpoints") in errors[0][1]


BESIDE: list[tuple[str, str]] = [
    ("run.json", "run.json"),
    ("metrics.jsonl", "metrics.jsonl"),
    ("events.jsonl", "events.jsonl"),
    ("checkpoints/.lease-00000001.json", ".lease-00000001.json"),
]


@pytest.mark.parametrize(("file", "name"), BESIDE)
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["a pipe", "a directory"])
def test_a_run_whose_own_file_is_something_else_is_refused_by_name_on_all_ranks(
    pools: Any, ended: Path, tmp_path: Path, file: str, name: str, make: Callable[[Path], None]
) -> None:
    place = Path(shutil.copytree(ended, tmp_path / "place"))
    (place / "r" / file).unlink(missing_ok=True)
    make(place / "r" / file)

    errors = pools(1).errors(run, values_of(place, steps=5), str(place), timeout_seconds=PATIENCE_SECONDS)

    assert name in errors[0][1]
    assert "not a regular file" in errors[0][1]
    assert errors[0][0] in {"UserError", "ConfigError"}, errors
    assert saved_steps(place) == [2, 4]


def test_pins_that_are_a_pipe_are_named(pools: Any, ended: Path, tmp_path: Path) -> None:
    from holdfast.checkpoint.keep.retention import read_pins
    from holdfast.checkpoint.place.storage import LocalStorage

    os.mkfifo(tmp_path / "pins.json")

    with pytest.raises(CheckpointCorrupt, match=r"pins\.json is damaged .*it is a pipe, not a regular file"):
        read_pins(LocalStorage(tmp_path))


def test_a_checkpoint_under_another_name_is_named_and_not_passed_over_silently(
    pools: Any, ended: Path, tmp_path: Path, straight: list[tuple[Any, ...]]
) -> None:
    place = Path(shutil.copytree(ended, tmp_path / "place"))
    checkpoints = place / "r/checkpoints"
    (checkpoints / NEWEST).rename(checkpoints / "step-4")

    ((_, said),) = pools(1).run(run_and_listen, values_of(place, steps=5))

    assert "resuming from step 2" in said
    assert "step-4 is passed over: it has the name of no checkpoint; rename it to step-00000004" in said
    assert log_of(place) == straight


def test_a_run_whose_only_checkpoint_has_another_name_does_not_begin_anew(
    pools: Any, ended: Path, tmp_path: Path
) -> None:
    place = Path(shutil.copytree(ended, tmp_path / "place"))
    checkpoints = place / "r/checkpoints"
    (checkpoints / NEWEST).rename(checkpoints / "step-4")
    shutil.rmtree(checkpoints / "step-00000002")

    errors = pools(1).errors(run, values_of(place, steps=5))

    assert errors[0][0] == NoCheckpoint.__name__
    assert "step-4 is passed over: it has the name of no checkpoint; rename it to step-00000004" in errors[0][1]


def run_and_listen(world: World, values: dict[str, Any]) -> tuple[int, str]:
    """Run, and return the last step with what was printed."""
    import contextlib
    import io

    heard = io.StringIO()
    with contextlib.redirect_stdout(heard):
        outcome = run(world, values)
    return outcome.step, heard.getvalue()
