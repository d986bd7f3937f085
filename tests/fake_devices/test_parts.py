"""A plan's parts against sums by hand: each part, never totals alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fake_devices.conftest import executed, needs_guard
from tests.fake_devices.parts import SHAPES, by_hand

pytestmark = [pytest.mark.devices, pytest.mark.timeout(1800)]

TOLERANCE = 0.02


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each shape's plan says."""
    needs_guard()
    folder: Path = tmp_path_factory.mktemp("parts")
    return executed(folder, 0, 0)


@pytest.mark.cases("all")
@pytest.mark.parametrize("name", SHAPES)
def test_every_part_is_within_two_per_cent_of_the_sum_by_hand(planned: dict[str, dict[str, Any]], name: str) -> None:
    said = planned[name]
    assert "error" not in said, said["error"]
    differences = {}
    for phase, parts in by_hand(SHAPES[name]).items():
        counted = said["peaks"][f"{phase} cuda"][1]
        for kind, expected in parts.items():
            gap = counted.get(kind, 0) / expected - 1
            if abs(gap) > TOLERANCE:
                differences[phase, kind] = (counted.get(kind, 0), expected, round(gap, 4))
    assert not differences
