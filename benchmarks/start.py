"""Seconds and CPU seconds from a command to the first step: two machines of two ranks over one machine of four.

    benchmarks/start.py [--rounds 5]

Both "machines" are this one, so that both arms have the same cores: what is compared is what torchrun and a meeting of
machines cost. The third arm is torchrun on one machine. Arms take turns, backwards every other round; the median of the
ratios of a round is held against the target, in wall seconds and in CPU seconds.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = 1.2
VALUES = [
    *("steps=1", "data.synthetic.rows=512", "data.batch_size=8", "evaluation.sets={}", "evaluation.completions=null"),
    *("launch.device=cpu", "checkpoint.at_end=false", "checkpoint.export_at_end=false"),
]


def commands(arm: str, place: Path) -> list[list[str]]:
    """Return what an arm starts."""
    ours = [sys.executable, "-m", "holdfast.cli.main", "sft", str(ROOT / "examples" / "sft_sort.yaml"), *VALUES]
    run = [*ours, f"run.dir={place}", "run.name=run"]
    if arm == "one machine":
        return [[*run, "launch.ranks=4"]]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    machines = 1 if arm == "one machine, torchrun" else 2
    agent = [sys.executable, "-m", "holdfast.launch.agent", "--nnodes", str(machines), "--master-addr", "127.0.0.1"]
    options = ["--master-port", str(port), "--nproc-per-node", str(4 // machines), "--no-python"]
    return [[*agent, "--node-rank", str(number), *options, *run] for number in range(machines)]


def measure(arm: str) -> tuple[float, float]:
    """Return wall seconds until the first step has a line, and CPU seconds of everything."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run" / "metrics.jsonl"
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        began = time.monotonic()
        processes = [
            subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL) for command in commands(arm, Path(folder))
        ]
        while not metrics.exists() and any(process.poll() is None for process in processes):
            time.sleep(0.02)
        seconds = time.monotonic() - began
        codes = [process.wait() for process in processes]
        assert codes == [0] * len(codes), codes
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Print each round, then the medians; 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    arms = ("one machine", "one machine, torchrun", "two machines, torchrun")
    ratios: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms[1:]}
    for number in range(rounds):
        results = {arm: measure(arm) for arm in (arms if number % 2 == 0 else arms[::-1])}
        print("  ".join(f"{arm}: {wall:.1f} s, {cpu:.1f} CPU s" for arm, (wall, cpu) in results.items()), flush=True)
        for arm, values in ratios.items():
            values.append((results[arm][0] / results[arms[0]][0], results[arm][1] / results[arms[0]][1]))
    for arm, values in ratios.items():
        wall, cpu = (statistics.median(each[place] for each in values) for place in (0, 1))
        print(f"{arm}, over one machine's start: {wall:.3f} in wall seconds, {cpu:.3f} in CPU seconds")
    worst = statistics.median(each[0] for each in ratios[arms[2]])
    verdict = "ok" if worst <= TARGET else "MISS"
    print(f"start of 2 x 2 ranks under torchrun over one machine's of 4: {worst:.3f}, target <= {TARGET}: {verdict}")
    return int(worst > TARGET)


if __name__ == "__main__":
    sys.exit(main())
