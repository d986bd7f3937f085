"""What a policy says of a few tokens: how a model is compared with another one before step 1."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.data.packing import pack, to_device
from holdfast.data.weights import Share
from holdfast.models.policy import PolicyModel, without_dropout
from holdfast.types import Example, Scores


@torch.no_grad()
def probe_logprobs(model: PolicyModel, tokens: NDArray[np.int64], device: torch.device) -> Tensor:
    """Return [L - 1] log-probabilities of all tokens but the first; all ranks call this together."""
    example = Example(0, 0, tokens, np.arange(tokens.size) > 0)
    batch = to_device(pack([example], [Share(1.0, 1.0)], padded=model.padded), device)
    with without_dropout(model):
        scores = model(batch)
    assert isinstance(scores, Scores)
    return scores.logprobs
