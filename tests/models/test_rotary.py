"""Angles that depend on the length of a text are those of transformers for the text alone."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from holdfast.models.layers.rotary import rotary_boundaries

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 6.0],
}


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("llama", {}, ()),
        ("gpt2", {}, ()),
        ("llama", {"max_position_embeddings": 24, "rope_parameters": DYNAMIC}, (24,)),
        ("hunyuan_v1_dense", {"rope_parameters": DYNAMIC | {"alpha": 1000.0}}, ()),
        ("llama", {"rope_parameters": LONGROPE | {"factor": 4.0, "original_max_position_embeddings": 16}}, (16,)),
        ("llama", {"rope_parameters": LONGROPE | {"factor": 4.0, "short_factor": LONGROPE["long_factor"]}}, ()),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": DYNAMIC, "full_attention": {"rope_type": "default"}}},
            (131072,),
        ),
    ],
)
def test_boundaries_are_read_from_the_configuration(
    kind: str, settings: dict[str, Any], expected: tuple[int, ...]
) -> None:
    config = AutoConfig.for_model(kind, **settings)

    found = rotary_boundaries(config)

    assert found == expected
