"""Before step 1 the gradient of every trained parameter is compared with transformers' own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.architectures import OTHERS, RECURRENT, SETTINGS
from tests.training.gradient_cases import every_kind, one_matrix_off, random_start

LORA = {"rank": 4, "dropout": 0.5}
KINDS = [kind for kind in (*SETTINGS, *RECURRENT, *OTHERS) if kind != "llama4_text"]
SECTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "recomputed": {"parallel": {"recompute": "full"}},
}


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_architecture_passes(pools: Any, dtype: str) -> None:
    sections = {"parallel": {"compute_dtype": dtype}}
    (refused,) = pools(1).run(every_kind, KINDS, sections)

    assert refused == {}
