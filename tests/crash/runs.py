"""Real runs of the trainer, and what they left: the effective log, and the state of the last checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.checkpoint.inspect.compare import differences
from holdfast.checkpoint.keep import find
from holdfast.metrics.sink import read_metrics
from holdfast.parallel.mesh import World
from tests.training.cases import run, tree

COMPARED = ("step", "loss", "grad_norm", "data/order_hash", "learning_rate", "num_tokens", "epoch", "reward")


def values_of(directory: Path, *, steps: int, dropout: bool = True, **sections: Any) -> dict[str, Any]:
    """Return a run that saves every two steps, with dropout that makes random state matter."""
    values = tree(
        str(directory),
        steps=steps,
        checkpoint={"every_steps": 2, "keep": {"last": 9}, "export_at_end": False} | sections.pop("checkpoint", {}),
        model={"dropout": dropout} | sections.pop("model", {}),
        **sections,
    )
    values["model"]["config"] = values["model"]["config"] | {"attention_dropout": 0.3}
    return values


def run_each(world: World, several: Sequence[dict[str, Any]], base: str = ".") -> list[Any]:
    """Run one after the other and return the outcomes."""
    return [run(world, values, base) for values in several]


class SlowChannel:
    """A failure channel that holds a save up in one phase."""

    def __init__(self, inner: Any, phase: str, seconds: float) -> None:
        self._inner, self._phase, self._seconds = inner, phase, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def in_background(self, name: str) -> None:
        self._inner.in_background(name)
        if name == self._phase:
            time.sleep(self._seconds)


def run_with_slow_saves(world: World, values: dict[str, Any], base: str, seconds: float) -> Any:
    """Run with saves that take their time."""
    channel: Any = SlowChannel(world.failure, "shards", seconds)
    return run(replace(world, failure=channel), values, base)


def log_of(directory: Path) -> list[tuple[Any, ...]]:
    """Return what counts of each step of the run r, times aside."""
    return log_of_run(directory / "r")


def log_of_run(run_directory: Path) -> list[tuple[Any, ...]]:
    """Return what counts of each step, times aside."""
    lines = read_metrics(run_directory / "metrics.jsonl")
    return [tuple(line.get(name) for name in COMPARED) for line in lines if "loss" in line]


def saved_steps(directory: Path) -> list[int]:
    """Return the steps that have a checkpoint."""
    return sorted(int(path.name[5:]) for path in (directory / "r" / "checkpoints").glob("step-*"))


def state_differences(one: Path, two: Path) -> list[str]:
    """Return what differs between the newest checkpoints of two runs."""
    return list(differences(find.one(str(one / "r")), find.one(str(two / "r"))))
