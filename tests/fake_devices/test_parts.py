"""A plan's parts against sums by hand: each part, never totals alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fake_devices.conftest import executed, needs_guard
from tests.fake_devices.parts import SHAPES, by_hand, resumed_by_hand

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__), pytest.mark.timeout(1800)]

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


@pytest.mark.cases("all")
@pytest.mark.parametrize("name", SHAPES)
def test_the_load_of_a_checkpoint_is_within_two_per_cent_of_the_sum_by_hand(
    planned: dict[str, dict[str, Any]], name: str
) -> None:
    said = planned[name]
    assert "error" not in said, said["error"]
    for device, parts in resumed_by_hand(SHAPES[name]).items():
        for kind, expected in parts.items():
            counted = said["resumed"][f"resume {device}"][1].get(kind, 0)
            assert counted == pytest.approx(expected, rel=TOLERANCE), (device, kind)


@pytest.mark.cases("all")
@pytest.mark.parametrize("name", SHAPES)
def test_the_first_step_after_a_resume_takes_what_a_later_one_does(
    planned: dict[str, dict[str, Any]], name: str
) -> None:
    said = planned[name]
    for phase in ("forward cuda", "backward cuda", "optimizer cuda"):
        if phase in said["peaks"]:
            assert said["resumed"][phase][0] == pytest.approx(said["peaks"][phase][0], rel=TOLERANCE), phase


def test_what_recomputed_blocks_are_given_is_planned_in_host_memory(planned: dict[str, dict[str, Any]]) -> None:
    shape = SHAPES["activations offloaded"]
    rows = shape.tokens * shape.hidden * 2

    by_kind = planned["activations offloaded"]["peaks"]["forward cpu"][1]

    assert by_kind["activations"] == pytest.approx((shape.layers - 1) * rows, rel=TOLERANCE)
