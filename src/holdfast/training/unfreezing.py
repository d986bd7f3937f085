"""The moment at which a run begins to train what was frozen, and what follows from it."""

from __future__ import annotations

from holdfast.metrics.throughput import ModelCost
from holdfast.models.build import Blueprint
from holdfast.models.names import named_parameters
from holdfast.models.policy import PolicyModel
from holdfast.parallel.shards import sharded_parameters
from holdfast.training.run import Run


def unfreeze(run: Run, step: int) -> None:
    """Train what a run trains that has made so many steps; all ranks call this at the same step.

    It belongs to the end of a step, not to the beginning of the next: a checkpoint of a step always holds the same.
    """
    due = [stage for stage in run.unfreezing.waiting() if stage.at_step <= step]
    if not due:
        return
    parameters = sharded_parameters(run.policy)
    run.unfreezing.set_step(step)
    if run.averages is not None:
        run.averages.begin({name: parameters[name] for stage in due for name in stage.names})
    run.cost = cost_of(run.policy, run.origin)
    for stage in due:
        run.messages.append(f"trained from step {stage.at_step + 1} on: {', '.join(stage.patterns)}")


def freeze_again(run: Run) -> None:
    """Undo `unfreeze` in a run that has made no step: the checkpoint it was for could not be read."""
    if not run.unfreezing.stages:
        return
    run.unfreezing.set_step(0)
    if run.averages is not None:
        for name in run.unfreezing.names:
            run.averages.tensors.pop(name, None)
    run.cost = cost_of(run.policy, run.origin)
    run.messages.clear()


def cost_of(policy: PolicyModel, origin: Blueprint) -> ModelCost:
    """Return what a token costs with the parameters that are trained now."""
    text = origin.skeleton.config.get_text_config()
    sizes = {True: 0.0, False: 0.0}
    for name, value in named_parameters(policy).items():
        unused = policy.routers.unused(name, value.shape) if policy.routers is not None else 0.0
        sizes[value.requires_grad] += value.numel() - unused
    return ModelCost(sizes[True], sizes[False], text.num_hidden_layers, text.hidden_size)
