"""A run directory without a run: what a run writes, written by hand. Nothing here needs torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.config.sections.metrics import MetricsConfig
from holdfast.features.trackers.client import Trackers
from holdfast.metrics.sink import REWIND, JsonlSink

RUN_ID = "0123456789abcdef0123456789abcdef"
VERSIONS = {"python": "3.11.4", "torch": "2.13.0"}


class WrittenRun:
    """The files of a run with trackers, and the trackers of its present start."""

    def __init__(self, directory: Path, sinks: Sequence[Any], **more: Any) -> None:
        self.directory, self.base = directory, directory.parent
        directory.mkdir(parents=True, exist_ok=True)
        self.section = MetricsConfig.model_validate({"sinks": sinks, **more.pop("metrics", {})})
        configuration = {
            "run": {"dir": "runs", "name": "tiny"},
            "optim": {"kind": "adamw", "lr": 0.001},
            "metrics": self.section.model_dump(mode="json"),
            **more,
        }
        (directory / "run.json").write_text(json.dumps({"run_id": RUN_ID}))
        (directory / "versions.json").write_text(json.dumps(VERSIONS))
        (directory / "config.resolved.yaml").write_text(yaml.safe_dump(configuration))
        self.trackers: Trackers | None = None

    def start(self, to: int = 0) -> None:
        """Begin a start of the run at a step, as `Journal` does."""
        self.start_nothing()
        self.trackers = Trackers(self.section, self.directory, self.base)
        if self.lines.had_lines:
            self.lines.event({"event": "rewind", "to": to})
            self.samples.event({"event": "rewind", "to": to})
            self.trackers.write(to, {REWIND: float(to)})

    def start_nothing(self) -> None:
        """Begin the files alone."""
        self.lines = JsonlSink(self.directory / "metrics.jsonl")
        self.samples = JsonlSink(self.directory / "samples.jsonl")

    def step(self, step: int, **metrics: float) -> None:
        numbers = {name.replace("__", "/"): value for name, value in metrics.items()}
        self.lines.write(step, numbers)
        if self.trackers is not None:
            self.trackers.write(step, numbers)

    def sample(self, step: int, *samples: tuple[str, str, float | None]) -> None:
        """Write the completions of a step: prompt, completion and reward of each."""
        lines = [
            {"step": step, "sample_id": 1, "prompt": prompt, "completion": completion, "reward": reward}
            for prompt, completion, reward in samples
        ]
        for line in lines:
            self.samples.event(line)
        if self.trackers is not None:
            self.trackers.completions(lines)

    def end(self, status: str = "finished") -> list[str]:
        assert self.trackers is not None
        self.lines.close()
        self.samples.close()
        return self.trackers.close(status)

    def catch_up(self, label: str) -> None:
        """Send all by hand, as long as it takes: a run waits four seconds, which a busy machine may not meet."""
        command = [sys.executable, "-P", "-m", "holdfast.features.trackers.process", str(self.directory), label]
        subprocess.run([*command, str(self.base)], check=True, timeout=120)

    def processes(self) -> list[subprocess.Popen[bytes]]:
        assert self.trackers is not None
        return [each._process for each in self.trackers._trackers if each._process is not None]


def effective(values: Sequence[tuple[int, str, float]]) -> dict[tuple[int, str], float]:
    """Return the last value of every step and name: what a tracker says in the end."""
    return {(step, name): value for step, name, value in values}


def logged(directory: Path) -> dict[tuple[int, str], float]:
    """Return the same of the effective log."""
    from holdfast.metrics.sink import read_metrics

    return {
        (line["step"], name): value
        for line in read_metrics(directory / "metrics.jsonl")
        for name, value in line.items()
        if name != "step" and "event" not in line
    }


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return what a condition returns once it is true."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)
    return value


def text_of(folder: Path) -> Mapping[Path, bytes]:
    """Return every file below a folder."""
    return {
        Path(place) / name: (Path(place) / name).read_bytes() for place, _, names in os.walk(folder) for name in names
    }


def skip_without(kind: str) -> None:
    """Skip where the library is missing; it is not imported, since some read the environment only then."""
    if find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed; tools/test_trackers.sh has an environment with it")
