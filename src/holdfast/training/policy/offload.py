"""What of a policy's run rests in host memory while completions are sampled and scored (`residency`).

Parameters rest from the moment at which the engine has its copy until the rollout has ended, however it ends; optimizer
states, and averages of weights beside them, until the update that reads them. Between steps everything is awake, so
saves, exports, evaluations and resumes know nothing of it; the thread that saves in an emergency says `stay`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from holdfast.errors import ConfigError
from holdfast.parallel.shards import sharded_parameters
from holdfast.training.policy.run import PolicyRun
from holdfast.training.run import Trained

PARAMETERS, OPTIMIZER = "parameters", "optimizer"


@contextmanager
def resting(run: PolicyRun) -> Iterator[None]:
    """Let what `residency` names rest within the block; the optimizer rests on behind it."""
    section = run.config.residency
    if section.parameters == section.optimizer == "stay":
        yield
        return
    residency = run.trained.residency
    everyone = [run.trained, *run.common.companions.values()]
    try:
        with run.setting.phase("to_host"):  # before the engine's copy takes memory
            if section.optimizer == "host":
                for each in everyone:
                    residency.rest(OPTIMIZER, _states(each), besides=sharded_parameters(each.model).values())
        with run.setting.phase("rollout"):
            run.evaluation.sampler.publish(run.trained)  # what rests cannot be gathered
        with run.setting.phase("to_host"):
            if section.parameters == "host":
                residency.rest(PARAMETERS, _own_parameters(run))
                for each in run.common.companions.values():
                    residency.rest(PARAMETERS, sharded_parameters(each.model).values())
        yield
    finally:
        run.trained.wake(PARAMETERS)


@contextmanager
def awake_afterwards(trained: Trained) -> Iterator[None]:
    """Bring back whatever still rests when the block ends, however it ends."""
    try:
        yield
    finally:
        trained.wake()


def check_residency(run: PolicyRun) -> None:
    """Refuse parameters that shall rest where the engine reads them.

    Raises:
        ConfigError: The engine has no copy of the parameters.
    """
    if run.config.residency.parameters == "host" and not _own_parameters(run):
        raise ConfigError(
            "residency.parameters: host, but the policy is not sharded, and what samples reads the very weights that "
            f"are trained (one rank that computes in {run.trained.plan.compute_dtype}, as it stores). Leave it out, or "
            "train on several ranks."
        )


def _own_parameters(run: PolicyRun) -> list[Tensor]:
    """Return the parameters that the engine has copies of: what is gathered, or cast."""
    if not run.trained.plan.sharded:
        return []
    computed: torch.dtype = getattr(torch, run.trained.plan.compute_dtype)
    replicated, gathered = set(run.trained.plan.replicated), run.trained.plan.shard > 1
    return [
        value
        for name, value in sharded_parameters(run.trained.model).items()
        if name not in replicated and (gathered or value.dtype != computed)
    ]


def _states(trained: Trained) -> list[Tensor]:
    states = trained.optimizer.state.values()
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return tensors + ([] if trained.averages is None else list(trained.averages.tensors.values()))
