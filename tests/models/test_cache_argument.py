"""A cache goes to models and comes back under the name that this transformers has for it."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import DynamicCache

from holdfast.models.layers.attention import cache_argument, cache_of
from tests.tiny import tiny_model


def test_a_cache_is_filled_and_returned_and_no_name_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("qwen2")
    tokens = torch.arange(1, 9)[None]
    cache = DynamicCache(config=model.config)

    with caplog.at_level(logging.WARNING), torch.no_grad():
        first = model(input_ids=tokens[:, :5], use_cache=True, **cache_argument(model, cache))
        second = model(input_ids=tokens[:, 5:], use_cache=True, **cache_argument(model, cache_of(first)))
        whole = model(input_ids=tokens, use_cache=False)

    assert cache_of(first) is cache_of(second) is cache
    assert cache_of(whole) is None
    assert cache.get_seq_length() == 8
    assert torch.allclose(second.logits, whole.logits[:, 5:], atol=1e-5)
    assert [record for record in caplog.records if record.name.startswith("transformers")] == []
