"""CPU seconds until the ranks of a host have their rows, beside another checkout; private memory of a million rows.

    python benchmarks/rows.py [--against CHECKOUT] [--rounds 3] [--rows 100000] [--many 1000000]

An arm is four processes that open the same rows as ranks do: the first alone, then the others together. What counts are
CPU seconds of the opening, summed over the four; those of whole processes, with their imports, stand beside them. Both
checkouts take turns, backwards every other round, and the worst round is held against the target. Memory is resident
memory at its peak of the process that builds the index, and private memory of one that shares it and reads 10,000 rows;
both above what was in use before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import heading

ROOT = Path(__file__).parents[1]
RANKS, MOST_RATIO, MOST_MIB = 4, 0.5, 64
NAMES = ("rows.jsonl", "rows.json", "rows.csv", "rows.jsonl.gz")


def write(path: Path, rows: int) -> Path:
    """Write rows of 400 to 1,200 characters, as the suffix says."""
    chance = random.Random(0)
    words = [f"word{number}" for number in range(2_000)]
    made = ({"prompt": f"add {n}", "completion": " ".join(chance.choices(words, k=99))} for n in range(rows))
    lines = path.with_name("rows.jsonl")
    if not lines.exists():
        with lines.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in made)
    match "".join(path.suffixes):
        case ".json":
            path.write_text("[" + ",\n".join(lines.read_text().splitlines()) + "]")
        case ".csv":
            rows_of = (json.loads(line) for line in lines.open())
            path.write_text(
                "prompt,completion\n" + "".join(f"{row['prompt']},{row['completion']}\n" for row in rows_of)
            )
        case ".jsonl.gz":
            subprocess.run(["gzip", "-1kf", str(lines)], check=True)
    return path


def open_as_rank(path: Path) -> None:
    """Open the rows, say what it took, read some of them, and stay until told to go."""
    from holdfast.config.sections.data import SourceConfig
    from holdfast.data.rows.rows import open_source

    resting, peak, began = _private_bytes(), _peak_bytes(), time.process_time()
    source = open_source(SourceConfig(path=str(path)), Path())
    seconds = time.process_time() - began
    peak = _peak_bytes() - peak
    assert source.size is not None
    for index in random.Random(1).choices(range(source.size), k=10_000):
        source.row(index)
    private = _private_bytes()
    said = {"opening": seconds, "whole": began + seconds, "private": private - resting, "peak": peak}
    print(json.dumps(said), flush=True)
    sys.stdin.read()


def _private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024


def _peak_bytes() -> int:
    # Not ru_maxrss, which a process inherits from the one that started it.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def measured(checkout: Path, path: Path, ranks: int = RANKS) -> list[dict[str, float]]:
    """Return what each rank says."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout / "src")}
    command = [sys.executable, __file__, "--open", str(path)]
    processes: list[subprocess.Popen[str]] = []
    said: list[dict[str, float]] = []
    for turn in (range(1), range(1, ranks)):
        begun = [
            subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in turn
        ]
        processes += begun
        said += [json.loads(process.stdout.readline()) for process in begun if process.stdout]
    for process in processes:
        process.communicate()
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--many", type=int, default=1_000_000)
    parser.add_argument("--open", type=Path)
    options = parser.parse_args()
    if options.open:
        open_as_rank(options.open)
        return
    print(heading())
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES if options.against else ():
            path = write(Path(folder) / name, options.rows)
            ratios = []
            for number in range(options.rounds):
                arms = [options.against, ROOT][:: 1 if number % 2 == 0 else -1]
                sums = {arm: _sums(measured(arm, path)) for arm in arms}
                (before, before_whole), (now, now_whole) = sums[options.against], sums[ROOT]
                ratios.append(now / before)
                size = f"{options.rows:,} rows, {path.stat().st_size / 1e6:.0f} MB"
                whole = f"{before_whole:.2f} and {now_whole:.2f} with imports"
                print(
                    f"{name}, {size}: {before:.2f} before, {now:.2f} now ({whole}), ratio {ratios[-1]:.3f}", flush=True
                )
            missed |= max(ratios) > MOST_RATIO
            print(f"{name}: worst ratio {max(ratios):.3f}{' MISS' * (max(ratios) > MOST_RATIO)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "rows.jsonl", options.many)
        builds, shares = measured(ROOT, path, ranks=2)
        most = max(builds["peak"], shares["private"]) / 2**20
        missed |= most > MOST_MIB
        size = f"{options.many:,} rows, {path.stat().st_size / 1e6:.0f} MB"
        built, shared = builds["peak"] / 2**20, shares["private"] / 2**20
        print(
            f"{size}: {built:.1f} MiB of the process that builds, {shared:.1f} MiB of one that shares",
            "MISS" * (most > MOST_MIB),
        )
    sys.exit(1 if missed else 0)


def _sums(said: list[dict[str, float]]) -> tuple[float, float]:
    return sum(each["opening"] for each in said), sum(each["whole"] for each in said)


if __name__ == "__main__":
    main()
