"""Which models have a table of positions that ends, and which go on beyond the number in their configuration."""

from __future__ import annotations

import pytest

from holdfast.models.layers.family import Positions, positions_of
from tests.tiny import tiny_model


@pytest.mark.parametrize(
    ("kind", "overrides", "expected"),
    [
        ("gpt2", {}, Positions(128, True)),
        ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 64}, Positions(128, True)),
        ("gptj", {"rotary_dim": 8}, Positions(128, True)),
        ("llama", {}, Positions(128, False)),
        ("falcon", {"alibi": True}, Positions(128, False)),
    ],
)
def test_a_table_of_positions_is_known_from_angles(kind: str, overrides: dict[str, int], expected: Positions) -> None:
    assert positions_of(tiny_model(kind, **overrides)) == expected


def test_what_is_called_a_table_is_one_that_ends() -> None:
    import torch

    tokens = torch.ones((1, 129), dtype=torch.int64)

    with pytest.raises(IndexError):
        tiny_model("gpt2")(input_ids=tokens)
    assert torch.isfinite(tiny_model("llama")(input_ids=tokens).logits).all()
