"""Rates and decays of parameters chosen by name, and what a resume does when they were grouped otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.config.load import from_mapping
from holdfast.config.sections.optim import ParameterGroupConfig, SGDConfig
from holdfast.config.verbs.training import SFTConfig
from holdfast.errors import ConfigError
from holdfast.optim.schedule import set_learning_rates
from holdfast.optim.state import OptimizerState, collect, groups_of, matched_hyperparameters, names_of
from holdfast.training.setup.optimizers import build_optimizer


def parameters() -> dict[str, nn.Parameter]:
    return {
        "model.embed.weight": nn.Parameter(torch.tensor([[1.0, 2.0]])),
        "model.visual.mlp.weight": nn.Parameter(torch.tensor([[3.0, 4.0]])),
        "model.visual.mlp.bias": nn.Parameter(torch.tensor([5.0])),
        "model.layers.0.mlp.weight": nn.Parameter(torch.tensor([[6.0, 7.0]])),
        "model.layers.0.norm.weight": nn.Parameter(torch.tensor([8.0])),
        "model.old.weight": nn.Parameter(torch.tensor([9.0]), requires_grad=False),
    }


def group(match: str, **values: Any) -> ParameterGroupConfig:
    return ParameterGroupConfig(match=match, **values)


def of(lr: float = 0.5, weight_decay: float = 0.0, **groups: ParameterGroupConfig) -> SGDConfig:
    return SGDConfig(lr=lr, weight_decay=weight_decay, groups=groups)


def refused(config: SGDConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(config, parameters())
    return str(caught.value)


def test_an_update_moves_every_parameter_at_its_groups_own_share_of_the_schedule() -> None:
    named = parameters()
    before = {name: value.detach().numpy().copy() for name, value in named.items()}
    config = of(0.5, 0.25, vision=group("visual", lr=0.125), embed=group("embed|visual", weight_decay=1.0))
    optimizer = build_optimizer(config, named)

    rates = set_learning_rates(optimizer, 0.5)
    for value in named.values():
        value.grad = torch.ones_like(value)
    optimizer.step()

    # Plain gradient descent: w - rate * (1 + decay * w); half of each peak, no decay for biases and norms.
    expected = {
        "model.embed.weight": (0.25, 1.0),
        "model.visual.mlp.weight": (0.0625, 0.25),
        "model.visual.mlp.bias": (0.0625, 0.0),
        "model.layers.0.mlp.weight": (0.25, 0.25),
        "model.layers.0.norm.weight": (0.25, 0.0),
        "model.old.weight": (0.0, 0.0),
    }
    for name, (rate, decay) in expected.items():
        wanted = before[name] - rate * (1 + decay * before[name])
        np.testing.assert_allclose(named[name].detach().numpy(), wanted, rtol=1e-6, err_msg=name)
    assert rates == {"vision": 0.0625, "embed": 0.25}


def test_a_pattern_that_matches_nothing_is_refused_with_names_that_are_near() -> None:
    said = refused(of(vision=group(r"vissual\.mlp", lr=0.1)))

    assert "optim.groups.vision.match" in said
    assert "model.visual.mlp" in said


def test_a_group_of_frozen_parameters_is_refused() -> None:
    assert "frozen parameters only (model.old.weight)" in refused(of(old=group("old", lr=0.1)))


def test_a_group_whose_parameters_an_earlier_one_has_is_refused() -> None:
    said = refused(of(vision=group("visual", lr=0.1), mlp=group(r"visual\.mlp", lr=0.2)))

    assert "optim.groups.mlp.match" in said
    assert "an earlier entry" in said


def test_a_decay_that_no_parameter_of_its_group_has_is_refused() -> None:
    assert "reaches nothing" in refused(of(norms=group("norm", weight_decay=0.1)))


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"rest": {"match": "a", "lr": 1.0}}, "and not rest or adamw"),
        ({"vision": {"match": "visual"}}, "changes nothing"),
        ({"vision": {"match": "(", "lr": 1.0}}, "not a regular expression"),
        ({"vision": {"match": "a", "lr": 0}}, "groups.vision.lr"),
    ],
)
def test_groups_that_make_no_sense_are_refused_when_the_file_is_read(groups: dict[str, Any], said: str) -> None:
    values = {"steps": 1, "model": {"path": "m"}, "data": {"path": "d"}, "optim": {"groups": groups}}

    with pytest.raises(ConfigError, match=said):
        from_mapping(values, SFTConfig)


def test_hyperparameters_of_a_checkpoint_follow_the_names_of_parameters_into_other_groups() -> None:
    named = parameters()
    then = build_optimizer(of(0.5, 0.25, vision=group("visual", lr=0.125, weight_decay=0.75)), named)
    then.param_groups[0]["momentum"] = 0.5
    then.param_groups[1]["momentum"] = 0.5
    saved = collect(then, named)
    live = parameters()
    now = build_optimizer(of(0.5, 0.0, mlp=group(r"visual\.mlp\.weight", lr=0.0625), bias=group("bias", lr=0.25)), live)

    taken, refused = matched_hyperparameters(groups_of(now, names_of(now, live)), saved.groups)
    for live_group, values in zip(now.param_groups, taken, strict=True):
        live_group.update(values)

    assert refused == []
    found = {group["name"]: (group["weight_decay"], group["momentum"], group["peak_lr"]) for group in now.param_groups}
    assert found == {
        "mlp/decay": (0.75, 0.5, 0.0625),
        "bias/no_decay": (0.0, 0.5, 0.25),
        "decay": (0.25, 0.0, 0.5),
        "no_decay": (0.0, 0.0, 0.5),
    }


def test_one_group_cannot_take_two_values() -> None:
    named = parameters()
    then = build_optimizer(of(0.5, 0.25, vision=group("visual", weight_decay=0.75)), named)
    saved = collect(then, named)
    live = parameters()
    now = build_optimizer(of(0.5, 0.125), live)

    _, refused = matched_hyperparameters(groups_of(now, names_of(now, live)), saved.groups)

    assert refused == [
        "model.embed.weight has weight_decay 0.25 there and model.visual.mlp.weight 0.75, and this optimizer updates "
        "them in one group (give them groups of their own, or keep this run's hyper-parameters)"
    ]


def test_what_is_saved_of_a_group_is_its_own_rate() -> None:
    named = parameters()
    optimizer = build_optimizer(of(0.5, vision=group("visual", lr=0.125)), named)

    saved: OptimizerState = collect(optimizer, named)

    assert [dict(group.hyperparameters)["lr"] for group in saved.groups] == [0.125, 0.125, 0.5, 0.5]
