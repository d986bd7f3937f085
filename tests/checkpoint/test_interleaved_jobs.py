"""What one job reported as saved is never lost, nor mixed with another job's, in whatever order two of them work.

Two jobs resume and save in one bucket, or on one disk, under `Lease`, one operation at a time and by one clock; a seed
decides the order. Either is suspended with its lease before each of its operations in turn, as a machine that sleeps, a
rank that is slow or a request that takes minutes. Two jobs without a lease save the same steps on one disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from holdfast import patience
from holdfast.checkpoint.errors import SaveFailed
from holdfast.checkpoint.format.manifest import About, Manifest
from holdfast.checkpoint.keep.retention import remove_leftovers
from holdfast.checkpoint.place.layout import RANK, step_name
from holdfast.checkpoint.saving.writer import commit
from tests.checkpoint import planted_defects as planted
from tests.checkpoint.cases import newest_whole
from tests.checkpoint.crash_states import RANKS, Store, snapshot_of
from tests.checkpoint.interleaving import (
    STEPS,
    GivenBackTooEarly,
    NeverRenewed,
    Outcome,
    SteppedLease,
    disk_jobs,
    jobs_in,
)
from tests.checkpoint.recording_stores import Bucket, Contents, Disk

SEED = int(os.environ.get("HOLDFAST_SEED", "0"))
ORDERS = int(os.environ.get("HOLDFAST_ORDERS", "2"))
"""Orders of which the slow test suspends each job before each operation."""


@pytest.fixture(autouse=True)
def short() -> Iterator[None]:
    """Wait by the scheduler's clock alone."""
    before = patience.current
    patience.current = replace(before, lease_withdraw_seconds=0.0, session_look_seconds=0.0005)
    yield
    patience.current = before


class Suspended(Bucket):
    """A client that another job is faster than: it starts and commits step 1 in the middle of one operation."""

    def __init__(self, contents: Contents, moment: str) -> None:
        super().__init__(contents)
        self.moment = moment
        self.other: Manifest | None = None

    def _let_the_other_save(self) -> None:
        store = Bucket(self.contents)
        remove_leftovers(store, wait=True)
        self.other = commit(snapshot_of(1), store, About("run", 1, None, None), RANKS)

    def exists(self, path: str) -> bool:
        answer = super().exists(path)
        if self.moment == "after the look for the name" and path == step_name(1) and self.other is None:
            self._let_the_other_save()
        return answer

    def create(self, path: str) -> Any:
        if self.moment == "between shards and the rest" and RANK in path and self.other is None:
            self._let_the_other_save()
        return super().create(path)


@pytest.mark.parametrize("moment", ["after the look for the name", "between shards and the rest"])
def test_a_job_that_is_late_changes_nothing_in_a_checkpoint_of_another(moment: str) -> None:
    """On another mesh, it has a file that the other job's checkpoint does not list."""
    store = Suspended(Contents(), moment)
    snapshot = replace(snapshot_of(1, 1), coordinate={"shard": 0})

    with pytest.raises(SaveFailed):
        commit(snapshot, store, About("run", 1, None, None, mesh={"shard": 1}), RANKS)

    choice = newest_whole(Bucket(store.contents), RANKS)
    assert store.other is not None
    assert choice is not None
    assert choice.manifest.hash == store.other.hash


def suspended(kind: type[Store], seed: int, every: int = 1) -> Iterator[Outcome]:
    """Suspend each job before each of its operations, or before every so manieth."""
    for job, count in jobs_in(kind, seed).operations.items():
        for place in range(1 + seed % every, count + 1, every):
            yield jobs_in(kind, seed, {(job, place)})


@pytest.mark.parametrize("seed", range(SEED, SEED + 5))
@pytest.mark.parametrize("kind", [Disk, Bucket])
def test_two_jobs_that_are_never_suspended_save_one_after_the_other(kind: type[Store], seed: int) -> None:
    outcome = jobs_in(kind, seed)

    assert (outcome.failed, outcome.lost) == ([], [])
    assert sorted(step for _, step in outcome.saved) == list(range(1, 2 * STEPS + 1))
    assert outcome.saved[0][0] == outcome.saved[STEPS - 1][0] != outcome.saved[STEPS][0]


@pytest.mark.parametrize("seed", range(SEED, SEED + 2))
@pytest.mark.parametrize("kind", [Disk, Bucket])
def test_a_job_that_is_suspended_costs_no_save_that_was_reported(kind: type[Store], seed: int) -> None:
    outcomes = list(suspended(kind, seed, every=20))

    assert [outcome.lost for outcome in outcomes if outcome.lost] == []
    assert any(outcome.failed for outcome in outcomes)


@pytest.mark.slow
def test_a_job_that_is_suspended_anywhere_costs_no_save_that_was_reported(capsys: pytest.CaptureFixture[str]) -> None:
    count = failed = 0
    for kind, seed in product((Disk, Bucket), range(SEED, SEED + ORDERS)):
        for outcome in suspended(kind, seed):
            count += 1
            failed += bool(outcome.failed)
            assert outcome.lost == [], (kind, seed)

    with capsys.disabled():
        print(f"{count:,} interleavings, in {failed} of them a save failed")
    assert failed > 0


@pytest.mark.parametrize("seed", range(SEED, SEED + 10))
def test_of_two_jobs_that_save_the_same_steps_on_a_disk_one_wins_whole(seed: int) -> None:
    outcome = disk_jobs(seed)

    assert outcome.lost == []
    assert sorted(step for _, step in outcome.saved) == list(range(1, STEPS + 1))


def test_a_save_that_replaces_is_found() -> None:
    assert any(disk_jobs(seed, planted.PublishReplaces).lost for seed in range(100))


def test_puts_that_nobody_conditions_are_found() -> None:
    places = range(60, 70)  # the first job asks there whether its name is free, and then puts the reference

    assert any(jobs_in(planted.PutWhateverIsThere, 0, {("first", place)}).lost for place in places)


@pytest.mark.parametrize("lease", [NeverRenewed, GivenBackTooEarly])
def test_a_lease_that_does_not_hold_is_found(lease: type[SteppedLease]) -> None:
    assert any(jobs_in(Bucket, seed, lease=lease).failed for seed in range(10))
