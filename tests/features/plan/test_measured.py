"""A plan is compared with what a run measured, phase by phase."""

from __future__ import annotations

import json
from pathlib import Path

from holdfast.features.plan.checks.measured import measured_lines, measured_peaks

GIB = 2**30
PLANNED = {"load": 4 * GIB, "forward_backward": 17 * GIB, "optimizer": 14 * GIB, "unmeasured": GIB}


def run_of(place: Path, *peaks: dict[str, int]) -> Path:
    lines = [{"event": "memory", "step": step, "device": "cuda", "peaks": each} for step, each in enumerate(peaks, 1)]
    (place / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def test_the_last_peaks_of_a_run_count(tmp_path: Path) -> None:
    run_of(tmp_path, {"load": 1, "optimizer": 2}, {"load": 1, "optimizer": 3})

    assert measured_peaks(tmp_path) == ("cuda", {"load": 1, "optimizer": 3})
    assert measured_peaks(tmp_path / "nowhere") == ("", {})


def test_phases_that_both_know_are_compared(tmp_path: Path) -> None:
    run_of(tmp_path, {"load": 3 * GIB, "data": GIB, "forward_backward": 34 * GIB})

    assert measured_lines({"device": "h100", "clock_phases": PLANNED}, tmp_path) == [
        f"measured in {tmp_path}: load took 3 GiB of 4 GiB planned (75%)",
        f"measured in {tmp_path}: forward_backward took 34 GiB of 17 GiB planned (200%)",
    ]


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
