"""Routers that are told which experts to choose: the weights that mix them stay their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from holdfast.errors import ModelError
from holdfast.models.layers.expert_choices import ChoicesToFollow, column, why_not_replayed
from holdfast.models.layers.routers import routers_of
from tests.models.architectures import SETTINGS, strong_model
from tests.tiny import tiny_model

Numbers = NDArray[np.float64]


def softmax(logits: Numbers) -> Numbers:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    found: Numbers = powers / powers.sum(-1, keepdims=True)
    return found


def mixed(logits: Numbers, chosen: NDArray[np.int64], *, kind: str, config: Any) -> Numbers:
    """Return [T, k] what chosen experts weigh, as each architecture's paper has it."""
    at = np.take_along_axis
    if kind == "gpt_oss":
        return softmax(at(logits, chosen, -1))
    scores = 1 / (1 + np.exp(-logits)) if kind in {"glm4_moe", "deepseek_v3"} else softmax(logits)
    weights: Numbers = at(scores, chosen, -1)
    if kind == "mixtral" or config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights * getattr(config, "routed_scaling_factor", 1.0)


ROUTED = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe", "deepseek_v3")


@pytest.mark.parametrize("kind", ROUTED)
def test_a_router_weighs_the_experts_it_is_told_by_its_own_logits(kind: str) -> None:
    model = strong_model(kind).double()
    routers = [router for router, _ in routers_of(model)]
    follow = ChoicesToFollow(routers, kind)
    hidden = torch.randn(7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    own = [router(hidden) for router in routers]
    told = np.stack([np.array([[3, 0], [0, 1], [2, 1], [1, 3], [0, 2], [3, 2], [1, 0]])] * len(routers), 1)

    follow.follow(torch.from_numpy(told + 1).to(torch.int16))
    with follow.counted(torch.arange(7)) as differing:
        found = [router(hidden) for router in routers]

    for layer, (logits, weights, chosen) in enumerate(found):
        assert chosen.tolist() == told[:, layer].tolist()
        expected = mixed(logits.detach().double().numpy(), told[:, layer], kind=kind, config=model.config)
        np.testing.assert_allclose(weights.detach().numpy(), expected, rtol=1e-5, atol=1e-7)
        assert torch.equal(logits, own[layer][0])
        before = np.sort(own[layer][2].numpy(), -1)
        other = int((before != np.sort(told[:, layer], -1)).any(-1).sum())
        assert other > 0
        assert differing[layer].tolist() == [other, 7]

    follow.follow(None)
    for router, (_, weights, chosen) in zip(routers, own, strict=True):
        assert torch.equal(router(hidden)[1], weights)
        assert torch.equal(router(hidden)[2], chosen)


@pytest.mark.parametrize("kind", ROUTED)
def test_a_token_without_choices_is_routed_by_the_router(kind: str) -> None:
    model = strong_model(kind).double()
    router = routers_of(model)[0][0]
    follow = ChoicesToFollow([router], kind)
    hidden = torch.randn(4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    own = router(hidden)

    follow.follow(torch.tensor([[[0, 0]], [[1, 2]], [[0, 0]], [[4, 3]]], dtype=torch.int16))
    with follow.counted(torch.tensor([0, 3])) as differing:
        found = router(hidden)

    assert found[2][[1, 3]].tolist() == [[0, 1], [3, 2]]
    assert torch.equal(found[2][[0, 2]], own[2][[0, 2]])
    assert torch.equal(found[1][[0, 2]], own[1][[0, 2]])
    assert differing[0][1] == 1


def test_gradients_reach_a_router_through_the_experts_it_is_told() -> None:
    router: Any = routers_of(strong_model("mixtral").double())[0][0]
    hidden = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    told = torch.tensor([[0, 3], [2, 1], [1, 0], [3, 2], [0, 2]])
    factors = torch.arange(10, dtype=torch.float64).view(5, 2)
    by_hand = (hidden @ router.weight.T).float().softmax(-1).gather(1, told)  # in float32, as the router does
    (expected,) = torch.autograd.grad((by_hand / by_hand.sum(-1, keepdim=True) * factors).sum(), router.weight)

    ChoicesToFollow([router], "mixtral").follow((told[:, None] + 1).to(torch.int16))
    (found,) = torch.autograd.grad((router(hidden)[1] * factors).sum(), router.weight)

    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_choices_for_another_number_of_tokens_are_an_error_and_leave_nothing_behind() -> None:
    router = routers_of(strong_model("mixtral"))[0][0]
    follow = ChoicesToFollow([router], "mixtral")
    follow.follow(torch.ones(3, 1, 2, dtype=torch.int16))

    with pytest.raises(ModelError, match=r"router 0 of mixtral did not choose among 4 experts for 3 tokens"):
        router(torch.randn(4, 32))

    found = torch.topk(torch.arange(8.0).view(2, 4), 2)
    assert found.indices.tolist() == [[3, 2], [3, 2]]
    assert router(torch.randn(3, 32))[2].tolist() == [[0, 0]] * 3


@pytest.mark.parametrize("kind", sorted(SETTINGS))
def test_what_can_be_told_is_known_before_anything_runs(kind: str) -> None:
    with torch.device("meta"):
        model = tiny_model(kind, **SETTINGS[kind])
    routers = [router for router, _ in routers_of(model)]

    why = why_not_replayed(routers, 32)

    if kind == "phimoe":  # its sparse mixer takes one expert after the other
        assert why is not None
        assert "PhimoeTopKRouter" in why
    elif kind == "dbrx":  # its layers choose, not its routers
        assert why is not None
        assert "DbrxRouter" in why
    else:
        assert why is None if kind in ROUTED else why == "it is no mixture of experts"


class Gate(torch.nn.Linear):
    """A router that leaves choosing to others."""


def test_a_router_that_does_not_choose_is_named() -> None:
    with torch.device("meta"):
        gate = Gate(32, 4)

    assert why_not_replayed([gate], 32) == (
        "router 0 (Gate) does not choose by one topk over its experts, and say which"
    )


def test_a_router_that_does_not_say_what_it_chose_is_named() -> None:
    from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4Router

    with torch.device("meta"):
        router = Llama4Router(Llama4TextConfig(hidden_size=32, num_local_experts=4, num_experts_per_tok=1))

    assert why_not_replayed([router], 32) == (
        "router 0 (Llama4Router) does not choose by one topk over its experts, and say which"
    )


def test_a_group_that_is_left_out_now_has_the_weight_it_has() -> None:
    """DeepSeek-V2 makes scores of such groups 0 and takes the weights from what is left."""
    from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    limits = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    config = DeepseekV2Config(hidden_size=32, n_routed_experts=4, routed_scaling_factor=1.5, **limits)
    router = DeepseekV2TopkRouter(config)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(6, 32, generator=torch.Generator().manual_seed(3))
    chosen = router(hidden)[2]
    told = torch.where(chosen < 2, chosen + 2, chosen - 2)  # the other group's
    scores = softmax((hidden @ router.weight.T).detach().double().numpy())

    ChoicesToFollow([router], "deepseek_v2").follow((told[:, None] + 1).to(torch.int16))
    _, weights, followed = router(hidden)

    assert torch.equal(followed, told)
    np.testing.assert_allclose(weights.detach().numpy(), 1.5 * np.take_along_axis(scores, told.numpy(), -1), rtol=1e-5)


def test_what_was_never_read_is_left_to_the_router() -> None:
    prompt = np.array([[[1, 2]], [[3, 4]]], np.int16)
    own = [np.array([[2, 1]], np.int16), np.array([[4, 3]], np.int16), np.array([[1, 4]], np.int16)]

    assert column(prompt, own, 4)[:, 0].tolist() == [[1, 2], [3, 4], [2, 1], [0, 0]]
    assert column(prompt, own[:1], 4)[:, 0].tolist() == [[1, 2], [3, 4], [2, 1], [0, 0]]
    assert column(prompt, [], 3)[:, 0].tolist() == [[1, 2], [3, 4], [0, 0]]
