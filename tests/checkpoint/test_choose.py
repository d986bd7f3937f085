"""Which checkpoint a run continues from: the newest whole one, in one line, and never step 0 instead of a loss."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.errors import CheckpointUnreadable, NoCheckpoint
from holdfast.checkpoint.format.manifest import NAME
from holdfast.checkpoint.format.shards import shard_file
from holdfast.checkpoint.format.verification import verify_checkpoint
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import newest_whole, save_after
from tests.crash.faulty import MoodyStorage

SHARD = shard_file(1)


@pytest.fixture(scope="module")
def saved(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("saved")
    for step in (1, 2, 3):
        pools(2).run(save_after, str(run / f"step-0000000{step}"), 1)
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """Return a copy, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def damage(checkpoint: Path, file: str = SHARD) -> None:
    data = bytearray((checkpoint / file).read_bytes())
    data[-1] ^= 1
    (checkpoint / file).write_bytes(data)


def choose(world: World, directory: str) -> tuple[str, str]:
    choice = newest_whole(LocalStorage(Path(directory)), RankGroup())
    return ("", "") if choice is None else (choice.name, choice.message)


def test_the_newest_is_chosen_if_nothing_is_wrong(pools: Any, run: Path) -> None:
    found = pools(2).run(choose, str(run))

    assert found == [("step-00000003", "resuming from step 3, verified in 5 files")] * 2


def test_where_nothing_was_ever_saved_a_run_starts_at_step_0(pools: Any, tmp_path: Path) -> None:
    assert pools(2).run(choose, str(tmp_path / "new")) == [("", "")] * 2


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param(damage, rf"{SHARD} is damaged: its hash is not the manifest's\. Damaged", id="07-bit"),
        pytest.param(lambda folder: (folder / SHARD).unlink(), f"lacks {SHARD}", id="10-missing"),
        pytest.param(lambda folder: (folder / NAME).write_bytes(b""), "is damaged", id="12-manifest empty"),
    ],
)
def test_a_damaged_newest_is_put_aside_and_the_line_says_what_was_skipped_and_why(
    pools: Any, run: Path, fault: Any, reason: str
) -> None:
    import re

    fault(run / "step-00000003")

    found = pools(2).run(choose, str(run))

    assert found[0] == found[1]
    name, words = found[0]
    assert name == "step-00000002"
    assert words.startswith("resuming from step 2, verified in 5 files; skipped step 3 (")
    assert re.search(reason, words)
    assert "\n" not in words
    names = sorted(path.name for path in run.iterdir())
    assert names[1:] == ["step-00000001", "step-00000002"]
    assert names[0].startswith(".quarantine-step-00000003-")


@pytest.mark.parametrize("ranks", [pytest.param(2, id="12-manifest missing")])
def test_what_has_no_manifest_is_passed_over_and_left_where_it_is(pools: Any, run: Path, ranks: int) -> None:
    (run / "step-00000003" / NAME).unlink()
    damage(run / "step-00000002")

    found = pools(ranks).run(choose, str(run))

    assert found[0] == found[1]
    name, words = found[0]
    assert name == "step-00000001"
    holds = "assets, rank, tensors, trainer.json"
    assert f"skipped step 3 (is no checkpoint of Holdfast: it holds {holds}; it is left as it is)" in words
    names = sorted(path.name for path in run.iterdir())
    assert names[1:] == ["step-00000001", "step-00000003"]
    assert names[0].startswith(".quarantine-step-00000002-")


@pytest.mark.parametrize("ranks", [pytest.param(2, id="12-every checkpoint damaged")])
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_at_0_again(pools: Any, run: Path, ranks: int) -> None:
    for step in (1, 2, 3):
        damage(run / f"step-0000000{step}")

    errors = pools(ranks).errors(choose, str(run))

    assert errors[0] == errors[1]
    assert errors[0][0] == "NoCheckpoint"
    assert "has no whole checkpoint left: step 3 (" in errors[0][1]
    assert "To start again from step 0, choose another run.name." in errors[0][1]


@pytest.mark.parametrize("file", [SHARD, NAME])
def test_a_read_that_fails_for_a_while_is_tried_again(run: Path, file: str) -> None:
    storage = MoodyStorage(run, f"step-00000003/{file}", failures=2)

    choice = newest_whole(storage, RankGroup())

    assert choice is not None
    assert choice.name == "step-00000003"
    assert storage.failures == 0


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("file", [SHARD, NAME])
def test_what_cannot_be_read_is_refused_and_not_put_aside(run: Path, file: str, number: int) -> None:
    storage = MoodyStorage(run, f"step-00000003/{file}", failures=100, number=number)

    with pytest.raises(CheckpointUnreadable, match="Nothing is known of its bytes; try again when the file system"):
        newest_whole(storage, RankGroup())

    assert storage.renamed == []


def test_one_wrong_read_is_no_damage(run: Path) -> None:
    storage = MoodyStorage(run, SHARD, failures=1, number=None)

    choice = newest_whole(storage, RankGroup())

    assert choice is not None
    assert (choice.name, storage.renamed) == ("step-00000003", [])


def test_two_reads_that_are_wrong_in_different_ways_put_nothing_aside(run: Path) -> None:
    storage = MoodyStorage(run, SHARD, failures=2, number=None)

    with pytest.raises(CheckpointUnreadable, match="has other bytes each time it is read"):
        newest_whole(storage, RankGroup())

    assert storage.renamed == []


def test_looking_never_renames(run: Path) -> None:
    from holdfast.cli.commands.checkpoint.views import listing, verification

    damage(run / "step-00000003")
    storage = LocalStorage(run)

    with pytest.raises(Exception, match="is damaged"):
        verify_checkpoint(storage, "step-00000003")
    list(listing(str(run), []))
    verification(str(run), "tensors")

    assert storage.names() == [f"step-0000000{step}" for step in (1, 2, 3)]


def test_a_path_that_was_named_is_never_replaced_by_an_older_one(pools: Any, run: Path) -> None:
    from tests.checkpoint.cases import load_into_other

    damage(run / "step-00000003")

    errors = pools(2).errors(load_into_other, str(run / "step-00000003"))

    assert {name for name, _ in errors} == {"CheckpointCorrupt"}
    assert (run / "step-00000003").is_dir()


def test_no_checkpoint_is_a_user_s_error() -> None:
    assert NoCheckpoint.exit_code == 2
