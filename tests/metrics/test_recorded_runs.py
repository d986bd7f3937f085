"""Alarms over 40 recorded runs of the examples: silent in sound ones, and what a person would say of ten sick ones.

`python -m tests.metrics.record_runs` makes the records again; recorded/index.json has the command of each.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from holdfast.metrics.health import Health

FOLDER = Path(__file__).parent / "recorded"
RUNS = json.loads((FOLDER / "index.json").read_text())["runs"]
SICK = {
    "sick_dead": {"no_gradient": 7, "guessing": 10},
    "sick_rate_too_high": {"diverged": 8, "guessing": 10},
    "sick_hardly_a_rate": {"guessing": 30},
    "sick_forgets": {"diverged": 6},
    "sick_not_finite": {"skipped_updates": 4, "guessing": 10},
    "sick_reward_never": {"flat_groups": 5, "flat_reward": 20},
    "sick_policy_broken": {"flat_groups": 6, "flat_reward": 21},
    "sick_policy_certain": {"flat_groups": 5, "low_entropy": 5},
    "sick_pairs": {"diverged": 6},
    "sick_scorer": {"diverged": 6},
}
"""By run, the alarms that must sound, each with the last step by which it has."""


def alarms_of(name: str) -> dict[str, int]:
    """Return the first step of each alarm of a recorded run."""
    health, first = Health(RUNS[name]["vocabulary"]), {}
    for text in gzip.decompress((FOLDER / f"{name}.jsonl.gz").read_bytes()).splitlines():
        line = json.loads(text)
        for alarm in health.see(int(line["step"]), line):
            first.setdefault(alarm, int(line["step"]))
    return first


def test_forty_runs_are_recorded_and_ten_of_them_are_sick() -> None:
    files = {path.name.removesuffix(".jsonl.gz") for path in FOLDER.glob("*.gz")}

    assert files == set(RUNS)
    assert len(files) == 40
    assert {name for name in files if name.startswith("sick_")} == set(SICK)
    assert len(SICK) == 10
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1_000_000


@pytest.mark.parametrize("name", [name for name in RUNS if not name.startswith("sick_")])
def test_no_alarm_sounds_in_a_sound_run(name: str) -> None:
    assert alarms_of(name) == {}


@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_is_told_in_time(name: str) -> None:
    found = alarms_of(name)

    assert {alarm: step for alarm, step in SICK[name].items() if found.get(alarm, 10**9) > step} == {}, found
