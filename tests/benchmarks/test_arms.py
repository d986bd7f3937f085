"""Arms that run alone, the verdicts on them, and the rows that they leave for a table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

SCRIPT = """\
import json, sys, time
from pathlib import Path

from measure import alternate
from verdicts import Verdicts

log = Path(__file__).with_suffix(".log")

def arm(name):
    with log.open("a") as file:
        print(name, "begins", file=file)
    if name == "fails":
        sys.exit("no memory is left")
    time.sleep(0.05)
    with log.open("a") as file:
        print(name, "ends", file=file)
    print(json.dumps({"seconds": {"fast": 2.0, "slow": 5.0}[name]}))

if "--arm" in sys.argv:
    arm(sys.argv[sys.argv.index("--arm") + 1])
    sys.exit()
rounds = alternate(__file__, ["fast", "slow", "fails"], 2, alone=True)
verdicts = Verdicts(rounds, judged="--tiny" not in sys.argv)
verdicts.tell("seconds, fast", "fast", "seconds")
verdicts.at_least(2.4, "slow over fast", "slow", "fast", "seconds")
verdicts.at_least(2.6, "slow over fast, too much asked", "slow", "fast", "seconds")
verdicts.at_most(None, "fast over slow", "fast", "slow", "seconds")
verdicts.number_at_most(2.0, "seconds, within", "fast", "seconds")
if "--with-failed" in sys.argv:
    verdicts.at_most(1.0, "fails over fast", "fails", "fast", "seconds")
sys.exit(verdicts.missed)
"""


def run(folder: Path, *flags: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script; return what became of it, and its rows."""
    script, rows = folder / "script.py", folder / "rows"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS), "HOLDFAST_BENCHMARK_ROWS": str(rows)}
    command = [sys.executable, str(script), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done, rows.read_text().splitlines()


def test_arms_that_run_alone_are_never_in_memory_together_and_change_their_order_every_other_round(
    tmp_path: Path,
) -> None:
    done, rows = run(tmp_path, "--tiny")

    assert (done.returncode, len(rows)) == (0, 5), done.stderr
    assert (tmp_path / "script.log").read_text().splitlines() == [
        "fast begins", "fast ends", "slow begins", "slow ends", "fails begins",
        "fails begins", "slow begins", "slow ends", "fast begins", "fast ends",
    ]  # fmt: skip


def test_each_measurement_leaves_a_row_with_its_target_and_whether_it_was_met(tmp_path: Path) -> None:
    done, rows = run(tmp_path)

    assert done.returncode == 1, done.stderr
    assert rows == [
        "seconds, fast |  | 2 |  |",
        "slow over fast | >= 2.4 | worst 2.500 (2.500 2.500) | met |",
        "slow over fast, too much asked | >= 2.6 | worst 2.500 (2.500 2.500) | **missed** |",
        "fast over slow |  | worst 0.400 (0.400 0.400) |  |",
        "seconds, within | <= 2.0 | worst 2 (2.000 2.000) | met |",
    ]


def test_tiny_shapes_show_targets_and_miss_none_but_an_arm_that_fails_is_missed_by_name(tmp_path: Path) -> None:
    done, rows = run(tmp_path, "--tiny", "--with-failed")

    assert done.returncode == 1
    assert rows[2] == "slow over fast, too much asked | >= 2.6 | worst 2.500 (2.500 2.500) |  |"
    assert rows[-1] == "fails over fast |  | not measured: fails failed: no memory is left | **missed** |"
