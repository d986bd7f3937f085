"""Whether our own decoding may compute long prompts in pieces, looked at when it first has weights: before step 1.

All ranks decide alike. A run that is continued looks again, on the weights that it began with, before it goes on.
"""

from __future__ import annotations

from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.training.run import ShardedModel


def settle_pieces(sharded: ShardedModel, engine: InProcessEngine) -> None:
    """Let an engine that has weights compute long texts in pieces if every rank saw that they give the same.

    All ranks call this together. Where no text can be longer than a piece, where layers are recurrent, and
    once it has been looked at, nothing is done.

    Args:
        sharded: The policy.
        engine: What samples from it.
    """
    if engine.in_pieces is not None or engine.longest <= engine.piece or sharded.origin.family.recurrent:
        return
    reasons = sharded.setting.ranks.gather(engine.why_whole())
    engine.in_pieces = not any(reasons)
    if not engine.in_pieces and sharded.setting.world.is_first:
        why = next(filter(None, reasons))
        print(f"rollouts compute long prompts at once, since in pieces they give something else: {why}", flush=True)
