"""Requeues of a job on two Slurm nodes at moments drawn uniformly over wall time, starts and saves included.

    benchmarks/requeues.py [--requeues 20] [--seed 0] [--verbs sft grpo] [--output TABLE.md]

Slurm's two nodes run on this host (tests/features/cluster; `tools/install_slurm.sh`), with two ranks each under
torchrun. A straight run gives the weights that count, and the seconds from a job's start to its first step. The same
job is then requeued by `scontrol` so many times, each at a moment drawn uniformly over twice as many seconds
(`--window`) of a start: half of them hit the start of processes, the rendezvous and the loading. The table has a line
for each: when, in what phase it hit, the newest checkpoint after it, the steps that were made and lost, and the seconds
from the next start to its first step. The final weights must be those of the straight run, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.features.cluster.slurm import Cluster, slurm  # noqa: E402 - the folder above is on the path from here on

HOLDFAST = [sys.executable, "-m", "holdfast.cli.main"]
QUIET = ["evaluation.sets={}", "launch.ranks=2", "launch.device=cpu", "checkpoint.every_steps=10"]
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
MOST_SECONDS = 30.0


@dataclass
class Requeue:
    """One line of the table."""

    after_seconds: float
    """From the job's start to the requeue."""
    phase: str
    step: int
    """Of the newest checkpoint when the job started again."""
    lost_steps: int
    """Steps that were made and had to be made again."""
    start_seconds: float | None
    """From the job's next start to its first step; None if it was requeued before that."""


class Job:
    """A run of an example as a batch job.

    Args:
        cluster: Where.
        verb: sft or grpo.
        name: Of the run.
        overrides: Of its file.
    """

    def __init__(self, cluster: Cluster, verb: str, name: str, overrides: Sequence[str]) -> None:
        self._cluster = cluster
        self.place = cluster.base / name
        command = [*HOLDFAST, "launch", "slurm", str(ROOT / "examples" / f"{verb}_sort.yaml"), "--nodes", "2"]
        values = [*QUIET, *overrides, f"run.dir={cluster.base}", f"run.name={name}"]
        answer = cluster.run(*command, "--interface", "lo", "--submit", *values, OMP_NUM_THREADS="1")
        assert answer.returncode == 0, answer.stderr
        self.number = answer.stdout.split()[-1]

    def shown(self, field: str) -> str:
        words = self._cluster.run("scontrol", "--oneliner", "show", "job", self.number).stdout.split()
        return next((word.partition("=")[2] for word in words if word.startswith(f"{field}=")), "")

    def await_start(self, restarts: int) -> float | None:
        """Return when the job runs for the time of that number; None once it has ended."""
        while True:
            if (state := self.shown("JobState")) in ENDED:
                return None
            if state == "RUNNING" and self.shown("Restarts") == str(restarts):
                return time.mktime(time.strptime(self.shown("StartTime"), "%Y-%m-%dT%H:%M:%S"))
            time.sleep(0.3)

    def requeue(self) -> None:
        assert self._cluster.run("scontrol", "requeue", self.number).returncode == 0

    def steps(self) -> list[dict[str, Any]]:
        metrics = self.place / "metrics.jsonl"
        return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []

    def saved(self) -> int:
        """Return the step of the newest checkpoint."""
        names = [path.name for path in (self.place / "checkpoints").glob("step-*")]
        return max((int(name.removeprefix("step-")) for name in names if name[5:].isdecimal()), default=0)

    def phase(self, started: float) -> str:
        """Return what goes on in the job that started then, as the files show it."""
        if not (self.place / "run.json").exists():
            return "before the run's directory"
        if list((self.place / "checkpoints").glob(".staging-*")):
            return "save"
        starts = [event["time"] for event in map(json.loads, self._events()) if event["event"] == "start"]
        return "training" if starts and starts[-1] > started else "start"

    def _events(self) -> list[str]:
        events = self.place / "events.jsonl"
        return events.read_text().splitlines() if events.exists() else []

    def weights(self) -> bytes:
        (file,) = (self.place / "exports").glob("*/model.safetensors")
        return file.read_bytes()

    def output(self) -> str:
        return self._cluster.output(self.number)


@contextmanager
def two_nodes() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="requeues-") as folder, slurm(Path(folder)) as cluster:
        yield cluster


def straight(cluster: Cluster, verb: str, overrides: Sequence[str]) -> tuple[Job, float]:
    """Make the run that nothing befalls; return it and the seconds from its start to its first step."""
    job = Job(cluster, verb, f"{verb}-straight", overrides)
    start = job.await_start(0)
    assert start is not None
    seconds = first_step(job, start, None)
    assert seconds is not None, job.output()
    while job.shown("JobState") not in ENDED:
        time.sleep(0.3)
    assert job.shown("JobState") == "COMPLETED", job.output()
    return job, seconds


def requeued(
    cluster: Cluster, verb: str, overrides: Sequence[str], moments: Sequence[float]
) -> tuple[Job, list[Requeue]]:
    """Requeue a job at moments after each of its starts, until it ends."""
    job, lines = Job(cluster, verb, f"{verb}-requeued", overrides), []
    started = job.await_start(0)
    for number, moment in enumerate(moments):
        assert started is not None
        time.sleep(max(0.0, started + moment - time.time()))
        if job.shown("JobState") in ENDED:
            break
        phase, made = job.phase(started), last_step(job)
        job.requeue()
        started = job.await_start(number + 1)
        saved = job.saved()
        horizon = started + moments[number + 1] if started is not None and number + 1 < len(moments) else None
        seconds = first_step(job, started, horizon) if started is not None else None
        lines.append(Requeue(moment, phase, saved, max(0, made - saved), seconds))
        print(lines[-1], flush=True)
    while job.shown("JobState") not in ENDED:
        time.sleep(0.3)
    assert job.shown("JobState") == "COMPLETED", job.output()
    return job, lines


def last_step(job: Job) -> int:
    return max((line["step"] for line in job.steps() if "loss" in line), default=0)


def first_step(job: Job, started: float, horizon: float | None) -> float | None:
    """Return the seconds from a start to its first step; None if the horizon or the end comes before."""
    count = len(job.steps())
    while (horizon is None or time.time() < horizon) and job.shown("JobState") not in ENDED:
        new = [line for line in job.steps()[count:] if "loss" in line]
        if new:
            return time.time() - started
        time.sleep(0.1)
    return None


def table(verb: str, lines: Sequence[Requeue], *, equal: bool, start_seconds: float) -> str:
    """Return the table of a verb."""
    head = f"## {verb}: {len(lines)} requeues, final weights {'equal bit for bit' if equal else 'DIFFER'}"
    rows = [
        f"| {number} | {line.after_seconds:.1f} | {line.phase} | {line.step} | {line.lost_steps} | "
        f"{'requeued before' if line.start_seconds is None else f'{line.start_seconds:.1f}'} |"
        for number, line in enumerate(lines, 1)
    ]
    worst = max((line.start_seconds or 0.0 for line in lines), default=0.0)
    return "\n".join(
        [
            head,
            "",
            (
                f"A straight run's first step comes {start_seconds:.1f} s after the job's start. Steps lost: "
                f"{sum(line.lost_steps for line in lines)} in all, at most "
                f"{max((line.lost_steps for line in lines), default=0)} by one requeue. From a job's next start to its "
                f"first step: at most {worst:.1f} s."
            ),
            "",
            "| | s after the job's start | in | newest checkpoint after it | steps lost | s to the first step |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> int:
    """Run, print the tables, and return 1 if weights differ or a requeue lost too much."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requeues", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--window", type=float, default=2.0, help="Of moments, in times of a start; smaller: more starts."
    )
    parser.add_argument("--verbs", nargs="+", default=["sft", "grpo"], choices=["sft", "grpo"])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    failed = False
    text = f"# Requeues at uniformly drawn moments, seed {options.seed}\n\n"
    with two_nodes() as cluster:
        for verb in options.verbs:
            overrides = {"sft": ["steps=400", "data.batch_size=8", "evaluation.completions=null"]}.get(verb, [])
            if verb == "grpo":
                base = Job(cluster, "sft", "demonstrations", ["steps=60", "evaluation.completions=null"])
                while base.shown("JobState") not in ENDED:
                    time.sleep(0.3)
                overrides = [
                    "steps=160",
                    "data.batch_size=8",
                    "evaluation.every_steps=null",
                    f"model.path={base.place / 'exports' / 'final'}",
                ]
            job, start_seconds = straight(cluster, verb, overrides)
            chance = random.Random(options.seed)
            moments = [chance.uniform(0, options.window * start_seconds) for _ in range(options.requeues)]
            again, lines = requeued(cluster, verb, overrides, moments)
            equal = again.weights() == job.weights()
            text += table(verb, lines, equal=equal, start_seconds=start_seconds) + "\n"
            slow = [line for line in lines if (line.start_seconds or 0) > MOST_SECONDS or line.lost_steps > 1]
            failed |= not equal or bool(slow)
            print(text, flush=True)
            if options.output is not None:
                options.output.write_text(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
