"""kill -9 of a rank anywhere in a save: the next start finds a verified step, no older than the last one confirmed.

From there on every loss is, bit for bit, that of the run that nothing happened to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.saving.writer import SAVE_PHASES
from tests.crash.cases import ALL_STEPS, STEPS, die_in_phase, die_in_storage, look_after, straight
from tests.crash.processes import acknowledged, run_doomed

OF_RANK_0 = {"manifest", "sync", "publish"}
PHASES_OF_RANK = {
    0: [*SAVE_PHASES, "read back", "retention"],
    1: [phase for phase in (*SAVE_PHASES, "read back", "retention") if phase not in OF_RANK_0],
}
COMMITTED = {"published", "read back", "retention"}
"""Phases that a rank enters when the checkpoint has its name."""

Straight = tuple[dict[int, dict[str, Any]], dict[int, float]]
"""States and losses by step, of a run that nothing happened to."""


@pytest.fixture(scope="module")
def expected(pools: Any) -> Straight:
    return pools(2).run(straight)[0]  # type: ignore[no-any-return]


def goes_on_bit_for_bit(found: dict[str, Any], expected: Straight) -> None:
    """Check what was loaded, and the losses of all steps after it."""
    states, losses = expected
    assert found["contents"] == states[found["chosen"]]
    assert found["losses"] == {step: losses[step] for step in range(found["chosen"] + 1, ALL_STEPS + 1)}


def check_after(pools: Any, directory: Path, expected: Straight) -> dict[str, Any]:
    """Start again on what a death left; return what was found."""
    confirmed = acknowledged(directory)

    found = pools(2).run(look_after, [directory])[0][0]

    assert confirmed[-1] == STEPS - 1
    assert found["chosen"] >= confirmed[-1]
    goes_on_bit_for_bit(found, expected)
    assert found["chosen"] in found["whole"]
    assert "skipped" not in found["words"]
    return found  # type: ignore[no-any-return]


@pytest.mark.cases("all")
@pytest.mark.parametrize(
    "background",
    [pytest.param(False, marks=pytest.mark.slow, id="waiting"), pytest.param(True, id="in the background")],
)
@pytest.mark.parametrize(
    ("victim", "phase"),
    [
        pytest.param(rank, phase, id=f"01-kill rank {rank} in phase {phase}")
        for rank, phases in PHASES_OF_RANK.items()
        for phase in phases
    ],
)
def test_a_rank_killed_in_any_phase_of_a_save_loses_nothing_that_was_confirmed(
    pools: Any, tmp_path: Path, expected: Straight, victim: int, phase: str, background: bool
) -> None:
    directory = tmp_path / "checkpoints"

    ended = run_doomed(die_in_phase, 2, directory, victim, phase, background)

    assert ended[victim].was_killed
    survivor = ended[1 - victim].error
    assert survivor is not None
    assert survivor[0] in {"RuntimeError", "DistBackendError", "SaveFailed", "CheckpointException"}
    found = check_after(pools, directory, expected)
    assert found["chosen"] == (STEPS if phase in COMMITTED else STEPS - 1)


@pytest.mark.cases("all")
@pytest.mark.parametrize(
    ("place", "victim"),
    [
        pytest.param("before a shard opens", 1, id="02-kill rank 1 before its shard opens"),
        pytest.param("half a shard", 1, id="03-kill rank 1 in the middle of its shard"),
        pytest.param("before the manifest", 0, id="04-kill rank 0 when all shards are there and the manifest is not"),
        pytest.param("half a manifest", 0, id="05-kill rank 0 in the middle of the manifest"),
        pytest.param("before the rename", 0, id="05-kill rank 0 before the checkpoint gets its name"),
    ],
)
def test_a_rank_killed_between_two_writes_of_a_save_leaves_the_one_before_whole(
    pools: Any, tmp_path: Path, expected: Straight, place: str, victim: int
) -> None:
    directory = tmp_path / "checkpoints"

    ended = run_doomed(die_in_storage, 2, directory, victim, place)

    assert ended[victim].was_killed
    assert check_after(pools, directory, expected)["chosen"] == STEPS - 1


def test_a_rank_killed_after_the_rename_and_before_its_fsync_leaves_a_whole_checkpoint(
    pools: Any, tmp_path: Path, expected: Straight
) -> None:
    directory = tmp_path / "checkpoints"

    ended = run_doomed(die_in_storage, 2, directory, 0, "after the rename")

    assert ended[0].was_killed
    assert check_after(pools, directory, expected)["chosen"] == STEPS


@pytest.mark.parametrize("place", ["before the trash", "between two trashes", "half a deletion"], ids="44-{}".format)
def test_a_kill_while_retention_deletes_leaves_no_half_checkpoint_under_a_step_s_name(
    pools: Any, tmp_path: Path, expected: Straight, place: str
) -> None:
    directory = tmp_path / "checkpoints"

    ended = run_doomed(die_in_storage, 2, directory, 0, place)

    assert ended[0].was_killed
    found = pools(2).run(look_after, [directory])[0][0]
    assert found["chosen"] == STEPS
    goes_on_bit_for_bit(found, expected)
    assert found["whole"] == ([1, 2, 3] if place == "before the trash" else [2, 3])
