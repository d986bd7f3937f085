"""A plan in a run's directory is compared with what the run measured, phase by phase."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.errors import UserError
from holdfast.features.plan.checks.findings import Grade
from holdfast.features.plan.checks.measured import (
    PLAN,
    PhasePeak,
    SavedPlan,
    compared,
    look_at_plan,
    measured_lines,
    measured_peaks,
)

GIB = 2**30
PLANNED = {"load": 4 * GIB, "forward_backward": 17 * GIB, "optimizer": 14 * GIB, "unmeasured": GIB}


def run_of(place: Path, *peaks: dict[str, int], device: str = "cuda") -> Path:
    lines = [{"event": "memory", "step": step, "device": device, "peaks": each} for step, each in enumerate(peaks, 1)]
    (place / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def saved(place: Path, device: str | None = "h100") -> None:
    (place / PLAN).write_text(json.dumps({"format": 1, "device": device, "clock_phases": PLANNED}))


def test_the_last_peaks_of_a_run_count(tmp_path: Path) -> None:
    run_of(tmp_path, {"load": 1, "optimizer": 2}, {"load": 1, "optimizer": 3})

    assert measured_peaks(tmp_path) == ("cuda", {"load": 1, "optimizer": 3})
    assert measured_peaks(tmp_path / "nowhere") == ("", {})


def test_phases_that_both_know_are_compared() -> None:
    measured = {"load": 3 * GIB, "data": GIB, "forward_backward": 18 * GIB}

    phases = compared(SavedPlan("cuda", PLANNED), "cuda", measured)

    assert phases == [PhasePeak("load", 4 * GIB, 3 * GIB), PhasePeak("forward_backward", 17 * GIB, 18 * GIB)]
    assert phases[1].ratio == 18 / 17


@pytest.mark.parametrize(
    ("took", "grade", "words"),
    [
        (18, Grade.ok, "forward_backward took 18 GiB of 17 GiB planned"),
        (20, Grade.warn, "forward_backward took 20 GiB of 17 GiB planned"),
    ],
)
def test_more_than_a_tenth_beyond_the_plan_is_a_warning(tmp_path: Path, took: int, grade: Grade, words: str) -> None:
    saved(run_of(tmp_path, {"load": 3 * GIB, "forward_backward": took * GIB}))

    (finding,) = look_at_plan(tmp_path)

    assert (finding.grade, finding.text) == (grade, words)


def test_on_a_cpu_what_was_there_before_the_model_counts_not_and_neither_do_small_phases(tmp_path: Path) -> None:
    line = {
        "event": "memory",
        "step": 1,
        "device": "cpu",
        "start": GIB,
        "peaks": {"load": 4 * GIB, "optimizer": 15 * GIB},
    }
    (tmp_path / "events.jsonl").write_text(json.dumps(line) + "\n")
    plan = {"device": None, "clock_phases": PLANNED | {"load": GIB // 2}}

    assert measured_lines(plan, tmp_path) == [f"measured in {tmp_path}: optimizer took 14 GiB of 14 GiB planned (100%)"]
    assert measured_lines(plan | {"device": "h100"}, tmp_path) == []


def test_devices_of_two_kinds_are_not_compared(tmp_path: Path) -> None:
    saved(run_of(tmp_path, {"load": 99 * GIB}, device="cpu"))

    (finding,) = look_at_plan(tmp_path)

    assert (finding.grade, "not compared" in finding.text) == (Grade.ok, True)


def test_without_a_plan_or_a_run_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert list(look_at_plan(tmp_path / "nowhere")) == []
    assert list(look_at_plan(run_of(tmp_path, {"load": 1}))) == []


def test_a_file_that_is_not_a_plan_is_named(tmp_path: Path) -> None:
    (tmp_path / PLAN).write_text('{"device": "cuda"}')

    with pytest.raises(UserError, match=r"plan\.json is not a plan of this version"):
        SavedPlan.read(tmp_path)
