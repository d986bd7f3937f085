"""Whatever a crash leaves of a save, a start goes on from the newest checkpoint that was reported, and loses none.

The slow test looks at all crashes, where more than ten effects were not durable at so many drawn subsets of them as
`HOLDFAST_SUBSETS` says: with 1,000, at 176,000 crashes. `HOLDFAST_SEED` draws others.
"""

from __future__ import annotations

import os
import random
import re

import pytest

from tests.checkpoint import planted_defects as planted
from tests.checkpoint.crash_states import (
    SCENARIOS,
    Job,
    Store,
    cuts_of,
    faults_of,
    record,
    record_recovery,
)
from tests.checkpoint.recording_stores import Bucket, Disk

FAST = 150
SUBSETS = int(os.environ.get("HOLDFAST_SUBSETS", "1000"))
SEED = int(os.environ.get("HOLDFAST_SEED", "0"))
CASES = [
    pytest.param(kind, name, id=f"{name}, {kind.__name__.lower()}") for kind in (Disk, Bucket) for name in SCENARIOS
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_start_after_a_crash_loses_nothing_that_was_reported(kind: type[Store], name: str) -> None:
    faults, looked_at, _ = faults_of(record(SCENARIOS[name], kind), FAST, SEED)

    assert faults == []
    assert looked_at >= 120


@pytest.mark.slow
def test_a_start_after_any_crash_loses_nothing_that_was_reported(capsys: pytest.CaptureFixture[str]) -> None:
    total = 0
    for case in CASES:
        kind, name = case.values
        recording = record(SCENARIOS[str(name)], kind)  # type: ignore[arg-type]
        faults, looked_at, distinct = faults_of(recording, None, SEED, subsets=SUBSETS)
        total += looked_at
        with capsys.disabled():
            print(f"{case.id}: {looked_at:,} crashes, {distinct:,} different states")
        assert faults == [], case.id
    assert total >= 10_000


def crashed_twice(kind: type[Store], name: str, first: int, second: int) -> int:
    """Crash in a scenario, and again in what the next start does; return how often."""
    recording, count = record(SCENARIOS[name], kind), 0
    in_order = [cut for cut in cuts_of(recording, SEED, 1000) if cut.in_order]
    for cut in random.Random(SEED).sample(in_order, min(first, len(in_order))):
        faults, looked_at, _ = faults_of(record_recovery(recording, cut), second, SEED)
        count += looked_at
        assert faults == [], cut
    return count


@pytest.mark.parametrize("kind", [Disk, Bucket])
def test_a_start_that_crashes_too_loses_nothing_that_was_reported(kind: type[Store]) -> None:
    assert crashed_twice(kind, "save with retention", 5, 40) == 200


@pytest.mark.slow
def test_a_start_that_crashes_anywhere_loses_nothing_that_was_reported() -> None:
    assert sum(crashed_twice(*case.values, first=20, second=100) for case in CASES) >= 10_000  # type: ignore[misc]


PLANTED: list[tuple[type[Store], type[Job], str, str]] = [
    (planted.NoFileIsSynced, Job, "second save", "not whole|not what was saved|is gone"),
    (planted.NewNameIsNotSynced, Job, "first save", "step 1 was reported and is gone"),
    (planted.NoFolderOfASaveIsSynced, Job, "second save", "is gone"),
    (planted.PublishedBeforeItsFilesAreSynced, Job, "second save", "not whole"),
    (planted.DeletedUnderItsOwnName, Job, "save with retention", "not whole"),
    (planted.PutAsideDeletes, Job, "put aside", "put aside and some of it is gone"),
    (planted.PutAsideIsNotSynced, Job, "put aside", "put aside and some of it is gone"),
    (planted.ReplacedInPlace, Job, "pin", "pins cannot be read"),
    (planted.ReferenceIsPutFirst, Job, "second save", "not whole"),
    (planted.DeletedBeforeItsReference, Job, "save with retention", "not whole"),
    (planted.MovedFileByFile, Job, "put aside", "put aside and some of it is gone"),
    (Disk, planted.RetentionBeforeTheSave, "save with retention", "step 1 was reported and is gone"),
    (Bucket, planted.RetentionBeforeTheSave, "save with retention", "step 1 was reported and is gone"),
    (Disk, planted.RetentionOfWhatIsWritten, "save with retention", "step 3 was reported and is gone"),
]
"""Storage, job, scenario, and what is said of some state."""


@pytest.mark.parametrize(
    ("kind", "job", "name", "said"),
    [pytest.param(*row, id=row[0].__name__ if row[1] is Job else row[1].__name__) for row in PLANTED],
)
def test_a_planted_defect_is_found(kind: type[Store], job: type[Job], name: str, said: str) -> None:
    faults, _, _ = faults_of(record(SCENARIOS[name], kind, job), 1000, SEED)

    assert any(re.search(said, fault) for _, fault in faults)
