"""CPU seconds of what a user waits for: `--help`, step 1 of the demo's model on 1 and 2 ranks, and the demo as a whole.

    python benchmarks/start_up.py [--rounds 5] [--against CHECKOUT]

CPU seconds are those of the command with every process that it starts; for step 1 until its line is written. With
another checkout the two take turns, and the median of the ratios of a round is printed, this one over the other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from measure import heading

ROOT = Path(__file__).parents[1]
CONFIGURATION = "src/holdfast/cli/commands/demo/demo_sft.yaml"
NO_END = ("checkpoint.at_end=false", "checkpoint.export_at_end=false", "evaluation.completions=null")


def started(checkout: Path, *arguments: str) -> psutil.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout / "src")}
    command = [sys.executable, "-m", "holdfast.cli.main", *arguments]
    return psutil.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def cpu_of(process: psutil.Popen) -> float:
    """Return the CPU seconds of a running process, its children so far, and theirs."""
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        try:
            total += sum(each.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def whole(checkout: Path, *arguments: str) -> float:
    """Return the CPU seconds of a command from its start to its end."""
    before = os.times()
    process = started(checkout, *arguments)
    assert process.wait() == 0, arguments
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def to_first_step(checkout: Path, ranks: int) -> float:
    """Return the CPU seconds of `holdfast sft` until step 1 has its line."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run" / "metrics.jsonl"
        values = ["steps=1", f"launch.ranks={ranks}", "launch.device=cpu", f"run.dir={folder}", "run.name=run", *NO_END]
        process = started(checkout, "sft", str(checkout / CONFIGURATION), *values)
        seconds = 0.0
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            seconds = cpu_of(process)
            time.sleep(0.01)
        assert process.wait() == 0
        return seconds


def demo(checkout: Path) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return whole(checkout, "demo", "--dir", folder)


MEASURES = {
    "holdfast --help": lambda checkout: whole(checkout, "--help"),
    "holdfast sft to step 1, 1 rank": lambda checkout: to_first_step(checkout, 1),
    "holdfast sft to step 1, 2 ranks": lambda checkout: to_first_step(checkout, 2),
    "holdfast demo": demo,
}


def rounds_of(name: str, checkouts: Sequence[Path], count: int) -> list[list[float]]:
    """Return the seconds of each checkout by round; they take turns, backwards every other round."""
    rounds = []
    for number in range(count):
        order = list(checkouts) if number % 2 == 0 else list(checkouts)[::-1]
        seconds = {checkout: MEASURES[name](checkout) for checkout in order}
        rounds.append([seconds[checkout] for checkout in checkouts])
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout")
    options = parser.parse_args()
    checkouts = [ROOT, *([options.against.resolve()] if options.against else [])]
    print(heading("transformers"))
    for name in MEASURES:
        count = 1 if name == "holdfast demo" else options.rounds
        rounds = rounds_of(name, checkouts, count)
        each = " ".join(f"{seconds[0]:.2f}" for seconds in rounds)
        print(f"{name}: {statistics.median(seconds[0] for seconds in rounds):.2f} CPU s (rounds {each})", flush=True)
        if options.against:
            ratios = [ours / theirs for ours, theirs in rounds]
            print(f"      over {options.against}: {statistics.median(ratios):.3f}", flush=True)


if __name__ == "__main__":
    main()
