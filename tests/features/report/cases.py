"""Run directories written by hand: what a run writes, with kills, numbers that are none, and hostile text."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import yaml

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "\u202e reversed \u2066 inside",
    "\x1b[2J\x07 bell \x00 null",
    "half \ud83d an emoji",
    "<!-- <script> ]]> &amp; &lt; \u2028 line \u2029 paragraph",
    "{{constructor.constructor('alert(3)')()}} ${alert(4)} javascript:alert(5)",
    "a" * 5000,
)


class RunFolder:
    """A run directory whose files a test appends to."""

    def __init__(self, place: Path, name: str = "run", *, steps: int | None = 100, **configuration: Any) -> None:
        self.place = place / name
        self.place.mkdir(parents=True)
        self.identity = {"run_id": f"{name:0>32}"[:32], "verb": "grpo", "format": 1, "parent": None}
        self.write("run.json", json.dumps(self.identity))
        self.write("versions.json", json.dumps({"python": "3.11.7", "torch": "2.13.0", "holdfast": "0.1.0"}))
        tree = {"run": {"dir": str(place), "name": name}, "seed": 0, "steps": steps, "optim": {"lr": 0.001}}
        self.write("config.resolved.yaml", yaml.safe_dump(tree | configuration))

    def write(self, file: str, text: str) -> None:
        (self.place / file).write_text(text)

    def append(self, file: str, *lines: object) -> None:
        with (self.place / file).open("a") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)

    def steps(self, first: int, last: int, **metrics: float | None) -> None:
        """Write lines of steps; loss falls and reward rises unless they are given."""
        for step in range(first, last + 1):
            numbers = {
                "loss": 1.0 / step,
                "reward": 1.0 - 1.0 / step,
                "timing/rollout": 0.1,
                "timing/forward_backward": 0.2,
            }
            numbers |= {"step_time": 0.35, "throughput/tokens_per_second": 1000.0 + step, "memory/resident_gib": 0.5}
            self.append("metrics.jsonl", {"step": step, **numbers, **metrics})

    def evaluate(self, step: int, accuracy: float) -> None:
        self.append(
            "metrics.jsonl", {"step": step, "eval/held_out/reward": accuracy, "eval/held_out/accuracy": accuracy}
        )

    def start(self, step: int, ranks: int = 2) -> None:
        self.append(
            "events.jsonl", {"event": "start", "step": step, "time": 1.7e9 + step, "ranks": ranks, "device": "cpu"}
        )
        if (self.place / "metrics.jsonl").exists():
            self.append("metrics.jsonl", {"event": "rewind", "to": step})
        if (self.place / "samples.jsonl").exists():
            self.append("samples.jsonl", {"event": "rewind", "to": step})

    def event(self, name: str, step: int, **values: object) -> None:
        self.append("events.jsonl", {"event": name, "step": step, **values})

    def save(self, step: int, *, there: bool = True, at: int | None = None) -> None:
        self.event("checkpoint", at or step, saved=step, bytes=1 << 20, seconds=0.25, deleted=[])
        if there:
            folder = self.place / "checkpoints" / f"step-{step:08d}"
            folder.mkdir(parents=True)
            contents = ["model", "optimizer", "trainer", "rank"]
            manifest = {"step": step, "contents": contents, "mesh": {"replicate": 1, "shard": 2}, "files": {}}
            (folder / "manifest.json").write_text(json.dumps({"manifest": manifest, "xxh3_128": ""}))

    def samples(self, step: int, prompt: str, completions: list[str], **more: Any) -> None:
        for place, completion in enumerate(completions):
            reward = (place + step) % len(completions) / len(completions)
            line = {"step": step, "sample_id": place, "prompt": prompt, "completion": completion, "reward": reward}
            line |= {"rewards": {"exact": reward}, "advantage": reward - 0.5, "finish": "stop", "trained": True}
            self.append("samples.jsonl", line | more)


def run_that_goes_back(place: Path) -> RunFolder:
    """Return a run that failed at steps 35, 20 and 50, and went back behind each."""
    run, begin = RunFolder(place), 1
    for last, back in ((35, 10), (20, 15), (50, 40)):
        run.steps(begin, last)
        run.event("failed", last, reason="killed")
        run.start(back)
        begin = back + 1
    return run


def killed_run(place: Path, name: str = "run") -> RunFolder:
    """Return a run of 60 steps with three kills, alarms, NaN, an export and hostile completions.

    It was killed at steps 14, 37 and 52, and went on from 10, 30 and 50.
    """
    run = RunFolder(place, name, steps=60)
    run.start(0)
    run.evaluate(0, 0.1)
    begin = 1
    for saved, killed in ((10, 14), (30, 37), (50, 52), (60, None)):
        last = killed or 60
        for step in range(begin, last + 1):
            run.steps(step, step, **({"loss": None} if step in {20, 21} else {}))
            if step % 10 == 0:
                run.save(step, there=step >= 40, at=step + 1)
                run.samples(step, f"prompt of step {step}", [*HOSTILE, f"plain answer {step}"])
        run.samples(last, f"prompt of step {last} <b>", [*HOSTILE, f"plain answer {last}"])
        if killed is None:
            break
        run.event(
            "failed", killed, reason=f"Rank 1 was killed by SIGKILL in phase 'rollout' at step {killed}.", time=1.7e9
        )
        run.start(saved)
        begin = saved + 1
    run.event("health", 40, alarm="flat_reward", text="the reward has been 0.5 in each of the last 20 steps.")
    run.event("export", 60, path=str(run.place / "exports/step-00000060"))
    tokens = [["plain", -0.1, 0.4], [" ans", -2.5, 0.4], ["wer", None, -0.2]]
    run.samples(60, "with tokens", ["plain answer"], tokens=tokens)
    run.evaluate(60, 0.9)
    run.event("done", 60)
    return run


def long_run(place: Path, steps: int = 100_000, samples: int = 20_000, metrics: int = 40) -> RunFolder:
    """Return a run of many steps and completions, written fast."""
    run = RunFolder(place, "long", steps=steps)
    generator = random.Random(0)
    run.start(0)
    names = [f"part/{number}" for number in range(metrics - 8)]
    with (run.place / "metrics.jsonl").open("w") as out:
        for step in range(1, steps + 1):
            line: dict[str, object] = {
                "step": step,
                "loss": math.exp(-step / steps) + generator.random(),
                "reward": step / steps,
            }
            line |= {"grad_norm": generator.random(), "step_time": 0.3, "timing/rollout": 0.1, "timing/reward": 0.1}
            line |= {name: generator.random() for name in names}
            line |= {"throughput/tokens_per_second": 1e4, "memory/resident_gib": 0.5}
            out.write(json.dumps(line) + "\n")
    words = ["the", "quick", "brown", "fox", "over", "lazy", "dog", "42", "+", "17", "=", "59", "so", "answer"]
    with (run.place / "samples.jsonl").open("w") as out:
        for number in range(samples):
            step = (number // 64 + 1) * max(1, steps * 64 // max(samples, 64))
            line = {
                "step": step,
                "sample_id": number,
                "prompt": f"question {number // 8}: " + " ".join(generator.choices(words, k=20)),
            }
            line |= {
                "completion": " ".join(generator.choices(words, k=90)),
                "reward": generator.random(),
                "rewards": {},
            }
            line |= {"advantage": generator.gauss(0, 1), "finish": "stop", "trained": True}
            out.write(json.dumps(line) + "\n")
    for step in range(1000, steps + 1, 1000):
        run.save(step, there=False)
    return run


def data_of(page: str) -> dict[str, Any]:
    """Return what a page's scripts draw."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    data: dict[str, Any] = json.loads(match[1])
    return data


def steps_of(run: dict[str, Any], number: int) -> list[int]:
    """Return a curve's steps as the page's script reads them."""
    steps: list[int] = run["steps"][number]
    return steps
