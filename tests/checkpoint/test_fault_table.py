"""Whatever a disk or a store answers in the middle of a verb, nothing that was reported is lost, and errors are ours.

The slow test tries every fault at every operation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from holdfast import patience
from tests.checkpoint.crash_states import Store
from tests.checkpoint.fault_table import VERBS, Case, Table
from tests.checkpoint.recording_stores import Bucket, Disk

ROWS = [pytest.param(kind, name, id=f"{name}, {kind.__name__.lower()}") for kind in (Disk, Bucket) for name in VERBS]
FAST = 60


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(patience, "current", replace(patience.current, file_retries_seconds=(0.0, 0.0, 0.0)))
    yield


def faults_of(kind: type[Store], verb: str, count: int | None) -> tuple[list[tuple[Case, str]], int]:
    """Return the cases in which a promise does not hold, and how many were tried."""
    table = Table(kind)
    cases = list(table.cases(verb))
    if count is not None:
        cases = random.Random(0).sample(cases, min(count, len(cases)))
    found = [(case, table.fault(case)) for case in cases]
    return [(case, fault) for case, fault in found if fault is not None], len(cases)


@pytest.mark.parametrize(("kind", "verb"), ROWS)
def test_a_fault_in_a_verb_costs_nothing_that_was_reported(kind: type[Store], verb: str) -> None:
    faults, _ = faults_of(kind, verb, FAST)

    assert faults == []


@pytest.mark.slow
def test_a_fault_at_any_operation_costs_nothing_that_was_reported(capsys: pytest.CaptureFixture[str]) -> None:
    total = 0
    for row in ROWS:
        kind, verb = row.values
        faults, count = faults_of(kind, str(verb), None)  # type: ignore[arg-type]
        total += count
        with capsys.disabled():
            print(f"{row.id}: {count:,} faults")
        assert faults == [], row.id
    assert total >= 5_000
