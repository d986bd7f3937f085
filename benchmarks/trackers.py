"""What trackers cost a run: a step with none, with csv, and with one that hangs for ever, turn by turn.

    python benchmarks/trackers.py [STEPS] [STEP_MILLISECONDS]

A step is matrix products of a length that is measured at the start. The three arms take turns step by step, in an order
that changes, so what else the machine does falls on all alike; the processes of all trackers live all the time. The
median ratio of neighbouring steps is by the clock; that of CPU seconds says the same without the machine's other work.
Each arm writes metrics.jsonl of 40 numbers, sends them to its trackers and asks these for news, as `Journal` does.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml
from measure import heading

from holdfast.config.sections.metrics import MetricsConfig
from holdfast.features.trackers.client import Trackers
from holdfast.metrics.sink import JsonlSink

NUMBERS = 40
HANGS = "import time\n\nclass Hangs:\n    def __init__(self, run):\n        time.sleep(1e9)\n"
SHARE_LIMIT, RATIO_LIMIT = 0.01, 1.02


class Arm:
    """A run directory with trackers."""

    def __init__(self, folder: Path, sinks: list[str]) -> None:
        folder.mkdir()
        (folder / "mine.py").write_text(HANGS)
        section = MetricsConfig.model_validate({"sinks": sinks})
        values = {"run": {"name": folder.name}, "metrics": section.model_dump(mode="json")}
        (folder / "config.resolved.yaml").write_text(yaml.safe_dump(values))
        (folder / "run.json").write_text(json.dumps({"run_id": folder.name}))
        (folder / "versions.json").write_text("{}")
        self.lines = JsonlSink(folder / "metrics.jsonl")
        self.trackers = Trackers(section, folder, folder)
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.own_seconds: list[float] = []

    def step(self, step: int, work: int, matrix: np.ndarray) -> None:
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(work):
            matrix @ matrix
        numbers = {f"metric/{number}": step / (number + 1) for number in range(NUMBERS)}
        self.lines.write(step, numbers)
        middle = time.perf_counter()
        self.trackers.write(step, numbers)
        self.trackers.news()
        self.own_seconds.append(time.perf_counter() - middle)
        self.seconds.append(time.perf_counter() - began)
        self.cpu_seconds.append(time.process_time() - cpu_began)


def main(steps: int = 200, step_milliseconds: float = 300.0) -> int:
    matrix = np.random.default_rng(0).standard_normal((256, 256))
    began = time.perf_counter()
    for _ in range(200):
        matrix @ matrix
    work = step_milliseconds / 1000 / ((time.perf_counter() - began) / 200)
    with tempfile.TemporaryDirectory() as folder:
        arms = {name: Arm(Path(folder) / name, sinks) for name, sinks in
                {"none": [], "csv": ["csv"], "hangs": ["mine.py:Hangs"]}.items()}  # fmt: skip
        time.sleep(3.0)  # the processes start
        orders = itertools.cycle(itertools.permutations(arms))
        for step in range(1, steps + 1):
            for name in next(orders):
                arms[name].step(step, round(work), matrix)
        ends: dict[str, float] = {}
        for name, arm in arms.items():
            began = time.perf_counter()
            arm.lines.close()
            arm.trackers.close("finished")
            ends[name] = time.perf_counter() - began
    print(heading())
    base = arms["none"]
    print(f"{steps} steps an arm, by the clock {sum(base.seconds):.1f} s without a tracker")
    missed = False
    for name, arm in arms.items():
        by_clock = statistics.median(a / b for a, b in zip(arm.seconds, base.seconds, strict=True))
        by_cpu = sum(arm.cpu_seconds) / sum(base.cpu_seconds)
        own = statistics.mean(arm.own_seconds)
        print(
            f"{name:6} median ratio of paired steps {by_clock:.4f}, of all steps "
            f"{sum(arm.seconds) / sum(base.seconds):.4f}, "
            f"of CPU seconds {by_cpu:.4f}; own time {1e6 * own:.1f} us a step, {100 * own / 0.1:.4f} % of 100 ms; "
            f"exit {ends[name]:.2f} s"
        )
        missed |= by_clock > RATIO_LIMIT or own / 0.1 > SHARE_LIMIT or ends[name] > 5.0
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(*[int(argument) for argument in sys.argv[1:]]))
