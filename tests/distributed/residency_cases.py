"""What rank pools run: whole runs whose engine looks at the memory of what is trained while it samples."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from holdfast.config.load import from_mapping
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import sharded_parameters
from holdfast.parallel.storages import storages_of
from holdfast.recipes.grpo import grpo_step
from holdfast.rewards.base import Sample, Scored
from holdfast.training.fit import fit
from holdfast.training.policy.build import build_policy_run
from holdfast.training.policy.evaluate import evaluate_policy
from holdfast.training.policy.run import PolicyTraining
from holdfast.training.setup.begin import Live
from tests.distributed.grpo_cases import even_share


def held(tensors: Iterable[Tensor]) -> int:
    return sum(storage.nbytes() for storage in storages_of(tensors).values())


def parameters_of(training: PolicyTraining) -> int:
    """Return the bytes that a rank holds of the parameters of policy and critic."""
    return sum(
        held(sharded_parameters(each.module).values()) for each in (training.model, *training.companions.values())
    )


def states_of(training: PolicyTraining) -> int:
    """Return the bytes of optimizer states and averages."""
    found = [] if training.model.averages is None else list(training.model.averages.tensors.values())
    for each in (training.model, *training.companions.values()):
        found += [value for state in each.optimizer.state.values() for value in state.values()]
    return held(value for value in found if isinstance(value, Tensor))


class Watching:
    """An engine that notes the bytes of what is trained, and once does something else first.

    Args:
        run: Whose engine it is.
        action: "", "raise" (on all ranks) or "sigterm" (to one); in the third rollout.
    """

    def __init__(self, training: PolicyTraining, action: str) -> None:
        self.inner, self.training, self.action = training.evaluation.sampler.engine, training, action
        self.seen: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def collect(self, interrupted: Any) -> Any:
        self.seen.append((parameters_of(self.training), states_of(self.training)))
        if len(self.seen) == 3 and self.action == "raise":
            time.sleep(self.training.run.world.rank)  # not all at one moment, as where a reward fails
            raise ValueError("in the middle of a rollout")
        if len(self.seen) == 3 and self.action == "sigterm" and self.training.run.world.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.inner.collect(interrupted)


def _score(samples: Sequence[Sample]) -> list[Scored]:
    return [Scored(value, {"exact": value}) for value in map(even_share, samples)]


def run_and_watch(world: World, tree: dict[str, Any], rows: Any, action: str = "") -> dict[str, Any]:
    """Run to the end, and return what the engine saw, and what was there between steps."""
    training = build_policy_run(from_mapping(tree, GRPOConfig), Path.cwd(), world, _score, Live(rows=rows))
    said = list(training.run.log.messages)
    engine = Watching(training, action)
    training.evaluation.sampler.engine = engine  # type: ignore[assignment]  # it passes everything on
    between: list[tuple[int, int]] = []
    lines: list[dict[str, float]] = []

    def step(training: PolicyTraining) -> dict[str, float] | None:
        between.append((parameters_of(training), states_of(training)))
        line = grpo_step(training)
        lines.append(dict(line or {}))
        return line

    error = ""
    try:
        fit(training, partial(step, training), partial(evaluate_policy, training.evaluation))
    except ValueError as raised:
        error = str(raised)
    times = sorted({name for name in training.run.log.clock.read() if name.endswith("_host")})
    told = {"seen": engine.seen, "between": between, "lines": lines, "error": error, "times": times}
    return told | {"said": said}
