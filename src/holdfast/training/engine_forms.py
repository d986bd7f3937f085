"""The optional forms of our own decoding, chosen when it first has weights: before step 1. All ranks decide alike."""

from __future__ import annotations

from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.training.run import Model


def settle_forms(model: Model, engine: InProcessEngine) -> None:
    """Choose the optional forms of an engine that has weights, once; all ranks call this together.

    Args:
        model: The policy.
        engine: What samples from it.
    """
    run = model.run
    # An engine of one evaluation has no part of the memory yet, and finds out for itself what it needs to know.
    if engine.block_limit is None:
        return
    for standing in engine.choose_forms(model.forms):
        # A form that is used where nothing else could be expected is no news.
        if run.world.is_first and (standing.reason or standing.speedups):
            print(standing, flush=True)
