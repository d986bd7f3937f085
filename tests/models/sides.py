"""What the check before step 1 compares, for a model that was built in a test."""

from __future__ import annotations

import copy
from typing import Any

import torch

from holdfast.models.check.forward import Sides
from holdfast.models.check.witness import witness_of
from holdfast.models.heads.policy import PolicyModel


def sides_of(policy: PolicyModel, dtype: torch.dtype = torch.float32, files: Any = None) -> Sides:
    """Return a policy beside the model of its files, by default those of its own configuration."""
    model: Any = policy.language_model
    return Sides(policy, witness_of(type(model), copy.deepcopy(files or model.config)), dtype, torch.device("cpu"))
