"""Which router loss a model is trained with, and which ones are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.config.sections.model import (
    AutoRouterLoss,
    BatchRouterLoss,
    NoRouterLoss,
    SequenceRouterLoss,
)
from holdfast.errors import ModelError
from holdfast.models.layers.routers import RouterLoss, choose_router_loss, routers_of
from tests.models.architectures import SETTINGS, strong_model
from tests.tiny import tiny_model

ROUTED = {"mixtral": 2, "qwen3_moe": 2, "olmoe": 2, "gpt_oss": 2, "glm4_moe": 1, "deepseek_v3": 1, "phimoe": 2}
ROUTED |= {"dbrx": 2}
"""Architecture and how many of its two layers have a router."""


@pytest.mark.parametrize("kind", sorted(SETTINGS))
def test_routers_are_found_where_there_are_some(kind: str) -> None:
    model = strong_model(kind, scale=1.0)

    found = routers_of(model)

    assert len(found) == ROUTED.get(kind, 0)
    for router, index in found:
        output = router(torch.randn(3, 32))
        logits = output[index] if isinstance(output, tuple) else output
        assert logits.shape == (3, 4)


@pytest.mark.parametrize(
    ("kind", "section", "expected"),
    [
        ("mixtral", AutoRouterLoss(), RouterLoss("sequence", 0.02)),
        ("mixtral", NoRouterLoss(), None),
        ("mixtral", SequenceRouterLoss(coefficient=0.5), RouterLoss("sequence", 0.5)),
        ("mixtral", BatchRouterLoss(), RouterLoss("batch", 0.02)),
        ("llama", AutoRouterLoss(), None),
        ("glm4_moe", AutoRouterLoss(), None),
    ],
)
def test_the_coefficient_is_the_section_s_or_else_the_model_s(kind: str, section: Any, expected: Any) -> None:
    options = {"router_aux_loss_coef": 0.02} if kind == "mixtral" else SETTINGS[kind]

    assert choose_router_loss(section, tiny_model(kind, **options))[0] == expected


def test_a_model_whose_coefficient_is_0_is_trained_without() -> None:
    model = tiny_model("mixtral", router_aux_loss_coef=0.0)

    assert choose_router_loss(AutoRouterLoss(), model) == (None, "router loss: off, since its coefficient is 0")
    with pytest.raises(ModelError, match=r"sequence, but .* mixtral has router_aux_loss_coef 0, .*coefficient"):
        choose_router_loss(SequenceRouterLoss(), model)


def test_a_model_that_transformers_has_no_router_loss_for_is_refused_one() -> None:
    model = tiny_model("glm4_moe", **SETTINGS["glm4_moe"])

    with pytest.raises(
        ModelError, match=r"sequence, but transformers has no router loss for glm4_moe.*router_loss: off"
    ):
        choose_router_loss(SequenceRouterLoss(coefficient=0.1), model)
