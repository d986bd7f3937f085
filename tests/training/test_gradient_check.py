"""Before step 1 the gradient of every trained parameter is compared with transformers' own."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.training.setup.gradient_check import GradientPair, Spread
from tests.models.architectures import BY_LENGTH, OTHERS, RECURRENT, SETTINGS
from tests.training.gradient_cases import (
    CHANGES,
    every_kind,
    not_finite,
    nothing_trained,
    one_matrix_off,
    random_start,
    some_trained,
    sound_models,
    unnamed,
)

LORA = {"rank": 4, "dropout": 0.5}
KINDS = [kind for kind in (*SETTINGS, *BY_LENGTH, *RECURRENT, *OTHERS) if kind != "llama4_text"]
SECTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "recomputed": {"parallel": {"recompute": "full"}},
}
BFLOAT16 = {"parallel": {"compute_dtype": "bfloat16"}}
NO_ANGLES = {"attention_bias": True, "no_rope_layers": [0, 0]}
KEYS_WITHOUT_ANGLES = [f"model.layers.{layer}.self_attn.k_proj.bias" for layer in (0, 1)]
"""Softmax does not change if all keys move, so their exact gradient is 0."""
DEEP = {
    "hidden_size": 64,
    "num_hidden_layers": 12,
    "max_window_layers": 12,
}
PLANTED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "small head": ("llama", "small head", {}, {}),
    "large weights": ("qwen2", "20 times as large", {}, {}),
    "small weights": ("llama", "a tenth as large", {}, {}),
    "no angles": ("smollm3", "as drawn", NO_ANGLES, {}),
    "tied": ("gpt2", "as drawn", {}, {}),
    "experts": ("mixtral", "as drawn", {}, {}),
    "adapters": ("llama", "as drawn", {}, {"model": {"lora": {"rank": 4}}}),
    "deep": ("llama", "as drawn", DEEP, {}),
}
SOUND = [
    ("smollm3", "as drawn", NO_ANGLES),
    ("smollm3", "100 times as large", NO_ANGLES),
    ("llama", "no outputs", {}),
    ("mixtral", "100 times as large", {}),
]
MORE_SOUND = [
    *((kind, change, {}) for kind in ("llama", "qwen2", "gpt2", "gpt_oss") for change in CHANGES),
    *((kind, change, DEEP) for kind in ("qwen2", "mixtral") for change in ("as drawn", "20 times as large")),
    ("llama", "as drawn", {"vocab_size": 50_000}),
    ("qwen3_moe", "20 times as large", {"num_experts": 64}),
]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", SECTIONS)
def test_one_matrix_whose_gradient_is_a_hundredth_too_large_is_named(pools: Any, ranks: int, name: str) -> None:
    for rank in pools(ranks).run(one_matrix_off, random_start("llama"), SECTIONS[name]):
        assert rank["sound"] < 1e-4
        assert "most of model.layers.1.self_attn.q_proj.weight (1.01 times as long, cosine 1.0" in rank["refused"]
        assert "model.check_gradients: false" in rank["refused"]
        assert rank["gradients"] == []
        assert rank["same"]
        assert rank["same_draws"]
        assert rank["training"]


def test_adapters_are_compared_too_with_their_dropout_left_out(pools: Any) -> None:
    (rank,) = pools(1).run(one_matrix_off, random_start("llama") | {"lora": LORA}, {})

    assert rank["parameters"] == 2 * 7 * 2
    assert rank["sound"] < 1e-4
    assert "most of model.layers.1.self_attn.q_proj.lora_" in rank["refused"]
    assert rank["same_draws"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_architecture_passes(pools: Any, dtype: str) -> None:
    sections = {"parallel": {"compute_dtype": dtype}}
    (refused,) = pools(1).run(every_kind, KINDS, sections)

    assert refused == {}


@pytest.mark.parametrize("name", [n if n == "small head" else pytest.param(n, marks=pytest.mark.slow) for n in PLANTED])
def test_a_hundredth_too_much_is_named_in_every_parameter_of_float32(pools: Any, name: str) -> None:
    (rank,) = pools(1).run(unnamed, *PLANTED[name], 1.01)

    assert rank["sound"] == ""
    assert rank["parameters"] > 20
    zero = [name for name in rank["missed"] if "lora_A" in name]  # while B is 0
    assert rank["missed"] == {"no angles": KEYS_WITHOUT_ANGLES}.get(name, zero)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "factor"), [("small head", 1.2), ("small head", -1.0), ("tied", -1.0), ("experts", 1.2)]
)
def test_in_bfloat16_a_fifth_too_much_and_a_wrong_sign_are_named(pools: Any, name: str, factor: float) -> None:
    kind, change, overrides, sections = PLANTED[name]

    (rank,) = pools(1).run(unnamed, kind, change, overrides, sections | BFLOAT16, factor)

    assert rank["sound"] == ""
    assert rank["missed"] == []


@pytest.mark.slow
def test_two_ranks_name_the_parameter_whose_shards_are_wrong(pools: Any) -> None:
    for rank in pools(2).run(unnamed, *PLANTED["small head"], 1.01):
        assert rank["sound"] == ""
        assert rank["missed"] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_rounding_alone_refuses_no_model(pools: Any, dtype: str) -> None:
    (refused,) = pools(1).run(sound_models, SOUND, {"parallel": {"compute_dtype": dtype}})

    assert refused == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_sound_models_with_large_and_small_weights_pass(pools: Any, dtype: str, recompute: str) -> None:
    sections = {"parallel": {"compute_dtype": dtype, "recompute": recompute}}

    (refused,) = pools(1).run(sound_models, MORE_SOUND, sections)

    assert refused == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_part_that_is_trained_and_trained_adapters_pass(pools: Any, dtype: str) -> None:
    parts: list[dict[str, Any]] = [
        {"lora": {"rank": 4}},
        {"freeze": ["model[.].*"]},
        {"freeze": [".*proj.*", "embeddings"]},
        {"freeze": ["model[.]layers.*", "model[.]norm.*"]},
    ]
    sections = [{"model": part, "parallel": {"compute_dtype": dtype}} for part in parts]

    (refused,) = pools(1).run(some_trained, sections)

    assert refused == ["", "", "", ""]


def test_where_nothing_is_trained_nothing_is_compared(pools: Any) -> None:
    assert pools(2).run(nothing_trained) == [(0, 0.0)] * 2


def test_a_gradient_that_is_not_finite_is_ours_or_the_model_s(pools: Any) -> None:
    ours, theirs = (pools(1).run(not_finite, side)[0] for side in (0, 1))

    assert "differ from transformers' own on the same tokens, most of model.norm.weight" in ours
    assert "The gradient of model.norm.weight is not finite in the backward pass of transformers' llama" in theirs


@pytest.mark.parametrize(
    ("pair", "spread", "agrees"),
    [
        (GradientPair(1.0, 1.0, 0.04, 4096), Spread(0.0, 0.0), True),
        (GradientPair(1.0, 1.0, 0.2, 4096), Spread(0.05, 0.05), True),
        (GradientPair(1.0, 1.0, 0.3, 4096), Spread(0.05, 0.05), False),
        (GradientPair(1.2, 1.0, 0.2, 4096), Spread(0.1, 0.01), False),  # a factor, and rounding scales nothing
        (GradientPair(0.0, 1.0, 1.0, 4096), Spread(0.25, 0.2), False),  # it is missing
        (GradientPair(1.0, 1.0, 2.0, 4096), Spread(0.4, 0.4), False),  # its sign is wrong
        (GradientPair(0.0, 1.0, 1.0, 4096), Spread(1.5, 0.3), True),  # rounding is all of it
        (GradientPair(0.0, 0.0, 0.0, 4096), Spread(0.0, 0.0), True),
        (GradientPair(float("nan"), 1.0, float("nan"), 9), Spread(1.0, 1.0), False),
        (GradientPair(float("inf"), 1.0, float("inf"), 9), Spread(float("inf"), 1.0), False),
    ],
)
def test_a_difference_is_wrong_beyond_both_limits(pair: GradientPair, spread: Spread, agrees: bool) -> None:
    assert pair.agrees(0.05, spread) is agrees


def test_a_pass_that_overflows_is_no_spread() -> None:
    spread = Spread(0.1, 0.1).or_larger(GradientPair(float("inf"), 1.0, float("inf"), 9))

    assert spread == Spread(0.1, 0.1)
    assert spread.or_larger(GradientPair(1.0, 1.0, 0.6, 9)) == pytest.approx((0.6, 0.2))
