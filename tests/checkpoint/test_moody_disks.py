"""A disk or network that errs once is asked again: only what two looks agree on is damage."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import checkpoint
from holdfast.checkpoint.errors import CheckpointUnreadable, NoCheckpoint
from holdfast.checkpoint.format.manifest import NAME
from holdfast.checkpoint.format.shards import shard_file
from holdfast.checkpoint.format.verification import read_manifest, verify_checkpoint
from holdfast.checkpoint.inspect.tensors import StoredCheckpoint
from holdfast.checkpoint.place.layout import TENSORS
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.config.load import EXPORTED_CONFIG
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build, newest_whole, optimizer_of, step
from tests.crash.faulty import FlippingStorage, ForgetfulStorage, MoodyStorage, UnopenableStorage
from tests.crash.runs import values_of
from tests.training.cases import run as train

NEWEST = "step-00000003"
SHARD = f"{NEWEST}/{shard_file(1)}"
MANIFEST = f"{NEWEST}/{NAME}"


def save_three(world: World, run: str) -> None:
    toy = build(world)
    optimizer = optimizer_of(toy)
    for number in (1, 2, 3):
        step(world, toy, optimizer, number)
        checkpoint.save(f"{run}/step-0000000{number}", toy, optimizer)


@pytest.fixture(scope="module")
def saved(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("saved")
    pools(2).run(save_three, str(run))
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """Return a copy, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def chosen(storage: MoodyStorage) -> str:
    """Return what a run would continue from, having used up every fault and renamed nothing."""
    choice = newest_whole(storage, RankGroup())
    assert choice is not None
    assert storage.failures == 0
    assert storage.renamed == []
    return choice.message


def test_one_wrong_read_of_the_manifest_is_no_damage(run: Path) -> None:
    words = chosen(FlippingStorage(run, MANIFEST, failures=1))

    assert words == "resuming from step 3, verified in 5 files"


def test_a_manifest_that_differs_from_read_to_read_is_refused_and_not_put_aside(run: Path) -> None:
    storage = FlippingStorage(run, MANIFEST, failures=100)

    with pytest.raises(CheckpointUnreadable, match=r"manifest\.json has other bytes each time it is read"):
        newest_whole(storage, RankGroup())

    assert storage.renamed == []


@pytest.mark.parametrize(
    ("question", "what", "number"),
    [
        ("exists", MANIFEST, errno.ESTALE),
        ("is_file", MANIFEST, errno.EIO),
        ("size", SHARD, errno.ESTALE),
        ("size", SHARD, errno.ETIMEDOUT),
        ("files", NEWEST, errno.EIO),
        ("names", "", errno.ESTALE),
    ],
)
def test_a_question_that_fails_for_a_while_is_asked_again(run: Path, question: str, what: str, number: int) -> None:
    words = chosen(ForgetfulStorage(run, question, what, failures=1, number=number))

    assert words == "resuming from step 3, verified in 5 files"


@pytest.mark.parametrize(
    ("question", "what"), [("exists", MANIFEST), ("is_file", MANIFEST), ("size", SHARD), ("files", NEWEST)]
)
def test_one_wrong_answer_is_no_damage(run: Path, question: str, what: str) -> None:
    words = chosen(ForgetfulStorage(run, question, what, failures=1, number=None))

    assert words == "resuming from step 3, verified in 5 files"


@pytest.mark.parametrize(
    ("question", "what"), [("exists", MANIFEST), ("size", SHARD), ("files", NEWEST), ("names", "")]
)
def test_a_question_that_never_gets_an_answer_is_refused_and_nothing_put_aside(
    run: Path, question: str, what: str
) -> None:
    storage = ForgetfulStorage(run, question, what, failures=100, number=errno.ESTALE)

    with pytest.raises(CheckpointUnreadable, match="Nothing is known of its bytes; try again when the file system"):
        newest_whole(storage, RankGroup())

    assert storage.renamed == []


class _Listing:
    """Fails when the operating system is asked to list one directory; an audit hook cannot be taken off again."""

    def __init__(self) -> None:
        self.place, self.failures = "", 0
        sys.addaudithook(self._heard)

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "os.scandir" and self.failures and str(args[0]) == self.place:
            self.failures -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), self.place)


@pytest.fixture(scope="module")
def listing() -> _Listing:
    return _Listing()


def test_a_directory_that_cannot_be_listed_once_is_listed_again(run: Path, listing: _Listing) -> None:
    listing.place, listing.failures = str(run / NEWEST / TENSORS), 1

    choice = newest_whole(LocalStorage(run), RankGroup())

    assert choice is not None
    assert choice.message == "resuming from step 3, verified in 5 files"
    assert listing.failures == 0


def test_a_directory_that_cannot_be_listed_is_not_taken_for_an_empty_one(run: Path, listing: _Listing) -> None:
    listing.place, listing.failures = str(run / NEWEST / TENSORS), 100

    try:
        with pytest.raises(CheckpointUnreadable, match=f"{NEWEST} cannot be read: Input/output error"):
            newest_whole(LocalStorage(run), RankGroup())
    finally:
        listing.failures = 0

    assert sorted(path.name for path in run.iterdir()) == [f"step-0000000{number}" for number in (1, 2, 3)]


def a_tensor_of(storage: LocalStorage) -> object:
    manifest = read_manifest(storage, NEWEST)
    return StoredCheckpoint(storage, NEWEST, manifest).read("model.blocks.0.trained.weight")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "look", [lambda storage: verify_checkpoint(storage, NEWEST), a_tensor_of], ids=["verify", "export"]
)
def test_a_shard_that_cannot_be_opened_is_not_called_damaged(run: Path, look: Callable[[LocalStorage], object]) -> None:
    look(UnopenableStorage(run, SHARD, failures=1))

    with pytest.raises(CheckpointUnreadable, match=rf"{SHARD} cannot be read: Input/output error\. Nothing is known"):
        look(UnopenableStorage(run, SHARD, failures=100))


def choose_with_a_fault_on_rank_0(world: World, run: str, question: str, what: str) -> None:
    failures = 100 if world.rank == 0 else 0
    newest_whole(ForgetfulStorage(Path(run), question, what, failures, errno.ESTALE), RankGroup())


@pytest.mark.parametrize(("question", "what"), [("exists", MANIFEST), ("size", SHARD), ("names", "")])
def test_what_rank_0_alone_cannot_ask_is_the_same_error_on_all(pools: Any, run: Path, question: str, what: str) -> None:
    errors = pools(2).errors(choose_with_a_fault_on_rank_0, str(run), question, what)

    assert errors[0] == errors[1]
    assert errors[0][0] == "CheckpointUnreadable"


def test_nothing_at_a_path_is_still_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpoint, match="there is nothing at this path"):
        verify_checkpoint(LocalStorage(tmp_path), NEWEST)


class _Opening:
    """Fails when this process opens files of one name, for a while."""

    def __init__(self) -> None:
        self.what, self.failures = "", 0
        sys.addaudithook(self._heard)

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and self.failures and str(args[0]).endswith(self.what):
            self.failures -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(args[0]))


def resume_with_a_fault_on_rank_1(world: World, values: dict[str, Any], what: str, failures: int) -> int:
    opening = _Opening()
    opening.what, opening.failures = what, failures if world.rank == 1 else 0
    try:
        return int(train(world, values).step)
    finally:
        opening.failures = 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("failures", [2, 1000])
def test_the_configuration_in_a_checkpoint_is_asked_for_again_then_refused_on_all_ranks(
    pools: Any, tmp_path: Path, failures: int
) -> None:
    pools(2).run(train, values_of(tmp_path, steps=2))
    what = f"step-00000002/assets/{EXPORTED_CONFIG}"

    found = pools(2).outcomes(
        resume_with_a_fault_on_rank_1, values_of(tmp_path, steps=4), what, failures, timeout_seconds=120
    )

    if failures < 4:
        assert found == [(True, 4)] * 2
    else:
        assert [ok for ok, _ in found] == [False] * 2
        assert found[0][1][0] == found[1][1][0] == "CheckpointUnreadable"
        assert f"{EXPORTED_CONFIG} cannot be read: Input/output error" in found[0][1][1]
