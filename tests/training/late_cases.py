"""Runs on a CPU whose numbers are read one update late, as on devices; a process too: `late_cases.py YAML [now]`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.config.load import from_mapping, load_config
from holdfast.config.verbs.training import SFTConfig
from holdfast.parallel.mesh import World, joined_world
from holdfast.training.evaluate import evaluate
from holdfast.training.fit import fit
from holdfast.training.run import StepAbandoned, Training
from holdfast.training.setup.begin import build_run
from holdfast.training.step import Update, UpdateNumbers, train_step


def fit_run(
    training: Training,
    *,
    late: bool,
    weights: Mapping[int, float] | None = None,
    fails_at: int | None = None,
    abandoned_at: int | None = None,
    fails_to_evaluate: bool = False,
    made: Callable[[Update], Update] = lambda update: update,
) -> Any:
    """Fit a run in which steps, counted from 1, meet something.

    Args:
        training: The run.
        late: Whether numbers are read one update late.
        weights: Factor of the weights of a step's tokens.
        fails_at: The step that raises an error before its update.
        abandoned_at: The step that is abandoned because of a SIGTERM.
        fails_to_evaluate: Whether evaluations raise an error.
        made: Returns what the loop gets of an update.
    """

    def step() -> Update | None:
        number = training.model.state.step + 1
        with training.run.phase("data"):
            mini_batch = training.stream.next(number - 1)
        if mini_batch is None:
            return None
        for batch in mini_batch.micro_batches:
            batch.weights.mul_((weights or {}).get(number, 1.0))
        if number == fails_at:
            raise ValueError("the step fails")
        if number == abandoned_at:
            os.kill(os.getpid(), signal.SIGTERM)
            raise StepAbandoned
        return made(train_step(training.model, mini_batch, training.evaluation.objective))

    def measure(interrupted: Any) -> dict[str, float]:
        if fails_to_evaluate:
            raise ValueError("the evaluation fails")
        return evaluate(training.evaluation, interrupted=interrupted)

    return fit(training, step, measure, reads_late=late)


def run_each(world: World, several: list[tuple[dict[str, Any], dict[str, Any]]], base: str = ".") -> list[Any]:
    """Fit one run after the other; return the outcome, or the error, of each."""
    results: list[Any] = []
    for values, options in several:
        training = build_run(from_mapping(values, SFTConfig), Path(base), world)
        try:
            results.append(fit_run(training, **options))
        except Exception as error:  # noqa: BLE001 - it is what is compared
            results.append((type(error).__name__, str(error)))
    return results


@dataclass
class NotedUpdate(Update):
    """An update that notes how many steps were made when its numbers were read."""

    reads: list[tuple[int, int]] = field(default_factory=list)

    def read(self) -> UpdateNumbers:
        """Note the update's step and the steps that were made, and return the metrics."""
        self.reads.append((self.step, self.model.state.step))
        return super().read()


def steps_when_read(world: World, values: dict[str, Any], late: bool, base: str = ".") -> list[tuple[int, int]]:
    """Return of each update, in the order of reads, how many steps were made when its numbers were read."""
    training = build_run(from_mapping(values, SFTConfig), Path(base), world)
    reads: list[tuple[int, int]] = []
    fit_run(training, late=late, made=lambda update: NotedUpdate(**vars(update), reads=reads))
    return reads


if __name__ == "__main__":
    loaded = load_config(Path(sys.argv[1]), [], SFTConfig)
    with joined_world(loaded.config.launch) as alone:
        fit_run(build_run(loaded.config, Path.cwd(), alone), late=sys.argv[2:] != ["now"])
