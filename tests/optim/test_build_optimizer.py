"""Which parameters an optimizer gets, and in which group."""

from __future__ import annotations

import pytest
import torch

from holdfast.config.sections.optim import AdamWConfig
from holdfast.errors import ModelError
from holdfast.training.setup.optimizers import build_optimizer


def parameters() -> dict[str, torch.nn.Parameter]:
    return {
        "model.layers.0.mlp.weight": torch.nn.Parameter(torch.ones(2, 2)),
        "model.layers.0.mlp.bias": torch.nn.Parameter(torch.ones(2)),
        "model.norm.weight": torch.nn.Parameter(torch.ones(2)),
        "model.visual.weight": torch.nn.Parameter(torch.ones(2), requires_grad=False),
    }


def test_frozen_parameters_are_left_out_and_norms_and_biases_do_not_decay() -> None:
    named = parameters()

    optimizer = build_optimizer(AdamWConfig(weight_decay=0.1), named)

    groups = {group["name"]: group for group in optimizer.param_groups}
    assert groups["decay"]["params"] == [named["model.layers.0.mlp.weight"]]
    assert groups["decay"]["weight_decay"] == 0.1
    assert [id(p) for p in groups["no_decay"]["params"]] == [
        id(named[name]) for name in ("model.layers.0.mlp.bias", "model.norm.weight")
    ]
    assert groups["no_decay"]["weight_decay"] == 0.0


def test_nothing_to_train_is_refused() -> None:
    frozen = {"w": torch.nn.Parameter(torch.ones(1), requires_grad=False)}

    with pytest.raises(ModelError, match=r"model\.freeze covers all"):
        build_optimizer(AdamWConfig(), frozen)
