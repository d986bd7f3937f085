"""Compare the scores of a row that ranks share with those of one rank, before step 1.

Packing only promises that tokens meet in attention. A layer that looks at neighbouring positions by another way, or
heads of another number than the configuration's, would train on wrong numbers without an error.
"""

from __future__ import annotations

import torch

from holdfast.data.batches.packing import Share, pack, split_row, to_device
from holdfast.errors import ModelError
from holdfast.models.check.forward import LEAK_TOLERANCE, Sides, change, documents
from holdfast.types import Batch, Scores


@torch.no_grad()
def check_spans(sides: Sides, spread: float) -> None:
    """Compare; all ranks call this together.

    Args:
        sides: The policy, sharded and filled.
        spread: Of a token's logits; differences are shares of it.

    Raises:
        ModelError: The scores differ.
    """
    policy, group = sides.policy, sides.policy.context
    assert group is not None
    first, _, second = documents(policy, sides.images)
    whole = pack([first, second], [Share(1.0, 1.0)] * 2, multiple_of=group.size)
    training = policy.training
    policy.eval()
    expected = _logprobs(sides, whole)
    found = _logprobs(sides, split_row(whole, group.rank, group.size))
    policy.train(training)
    difference = change(found, expected, sides.dtype) / spread
    if not difference <= LEAK_TOLERANCE[sides.dtype]:  # a comparison with NaN is False
        raise ModelError(
            f"parallel.context: {group.size}, but log-probabilities of {policy.family.name} change by "
            f"{difference * spread:.2e} when ranks share a row: some of its layers look at other positions by another "
            "way than attention. Leave parallel.context out; rows then have to fit one rank."
        )


def _logprobs(sides: Sides, batch: Batch) -> torch.Tensor:
    scores = sides.policy(to_device(batch, sides.device))
    assert isinstance(scores, Scores)
    return scores.values
