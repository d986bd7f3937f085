"""A small configuration of an architecture keeps one layer of each kind and every length that matters."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.models.check.boundaries import boundaries_of
from holdfast.models.check.shrink import one_of_each, shrink
from holdfast.models.files.configuration import maker, on_meta

GEMMA4 = {
    "text_config": {"model_type": "gemma4_text", "num_hidden_layers": 30, "num_kv_shared_layers": 10},
    "vision_config": {"model_type": "gemma4_vision"},
}


@pytest.mark.parametrize(
    ("kind", "values", "layers"),
    [
        ("llama", {}, 2),
        ("phimoe", {}, 2),
        ("deepseek_v3", {}, 4),  # three dense ones come first
        ("llama4", {}, 4),  # each fourth knows no places
        ("gemma4", GEMMA4, 12),  # five windows and one without, with keys of their own, and again with shared ones
        ("qwen3_next", {}, 4),
        ("gpt2", {}, 2),
        ("nemotron_h", {}, 4),  # its configuration lists kinds of layers, and no number
    ],
)
def test_a_small_model_of_the_same_kind_is_built(kind: str, values: dict[str, Any], layers: int) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **values)
    make = maker(config, False, False)

    small = shrink(config, lambda candidate: on_meta(make, candidate))

    model = on_meta(make, small)
    assert type(model).__name__ == type(on_meta(make, config)).__name__
    assert small.get_text_config().num_hidden_layers == layers
    assert boundaries_of(small) == boundaries_of(config)
    assert sum(value.numel() for value in model.parameters()) < 80_000_000


def test_layers_that_share_keys_are_kept_beside_those_that_have_some() -> None:
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 6
    text = {"num_hidden_layers": 30, "layer_types": kinds, "num_kv_shared_layers": 10}

    assert one_of_each(text) == [0, 1, 2, 3, 4, 25, 26, 27, 28, 29]
