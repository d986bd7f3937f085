"""The tree of `holdfast dpo`: what it accepts, what it refuses, and in which words."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.config.load import from_mapping
from holdfast.config.verbs.dpo import DPOConfig
from holdfast.config.verbs.roots import verb_of
from holdfast.config.verbs.training import as_plain
from holdfast.errors import ConfigError
from tests.config.json_schema import accepts
from tests.trees import run_from_mapping

LEAST: dict[str, Any] = {"steps": 1, "model": {"path": "m"}, "data": {"path": "d"}, "preference": {}}
SCHEMA = DPOConfig.model_json_schema()

TAKEN: list[dict[str, Any]] = [
    {},
    {"preference": {"loss": "ipo"}},
    {"preference": {"loss": {"beta": 0.3, "label_smoothing": 0.1}}},
    {"preference": {"loss": {"kind": "robust", "label_smoothing": 0.2}}},
    {"preference": {"loss": [{"kind": "dpo", "weight": 0.8}, {"kind": "orpo"}], "sft": 0.1}},
    {"preference": {"loss": {"kind": "path", "path": "f.py:g", "kwargs": {"a": 1}}}},
    {"preference": {"loss": "simpo"}, "reference": {"kind": "none"}},
    {"preference": {"loss": "kto"}, "data": {"path": "d", "max_length": 4096}},
    {"reference": {"kind": "offloaded"}},
    {"reference": {"precompute": True, "cache": "file"}},
    {"reference": {"kind": "server", "url": "https://host/v1", "precompute": True, "cache": "file"}},
    {"data": {"path": "d", "shared_prompt": "off", "unusable": "drop", "overlong": "refuse", "packing": "none"}},
    {"evaluation": {"sets": {"a": {"path": "x"}}, "completions": {"samples": 3}}},
]


@pytest.mark.parametrize("change", TAKEN)
def test_the_tree_and_its_schema_accept(change: dict[str, Any]) -> None:
    config = from_mapping(LEAST | change, DPOConfig)

    assert accepts(SCHEMA, LEAST | change)
    assert from_mapping(as_plain(config), DPOConfig) == config


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"preference": {"loss": []}}, "preference.loss: this list is empty; name at least one"),
    (
        {"reference": {"precompute": True, "sync": {"every_steps": 1}}},
        "reference.sync: reference.precompute asks the reference once, before it follows; leave one of them out",
    ),
    (
        {"preference": {"loss": "orpo"}, "reference": {"sync": {"every_steps": 1}}},
        "reference.sync: preference.loss: orpo compares with no reference; leave sync out",
    ),
    (
        {"preference": {"loss": "kto"}, "reference": {"precompute": True}},
        "reference.precompute: kto compares with answers of other rows of a batch; leave it out",
    ),
    ({"preference": {"loss": "dop"}}, "preference.loss: there is no kind 'dop'. Did you mean dpo?"),
    ({"preference": {"loss": {"kind": "ipo", "label_smoothing": 0.1}}}, "preference.loss.label_smoothing: "),
    ({"preference": {"loss": {"label_smoothing": 0.5}}}, "preference.loss.label_smoothing: "),
    (
        {"preference": {"loss": ["dpo", "kto"]}},
        "preference.loss: kto takes single answers with a label, dpo pairs of answers; keep one of the two",
    ),
    ({"preference": {"loss": ["dpo", "dpo"]}}, "preference.loss: dpo stands there twice"),
    (
        {"preference": {"loss": "orpo"}, "reference": {"kind": "sharded"}},
        "reference.kind: preference.loss: orpo compares with no reference; leave kind out",
    ),
    (
        {"preference": {"loss": "simpo"}, "reference": {"precompute": True}},
        "reference.precompute: preference.loss: simpo compares with no reference; leave precompute out",
    ),
    ({"reference": {"kind": "none"}}, "reference.kind: none, but preference.loss: dpo compares with a reference"),
    ({"reference": {"kind": "adapter_off"}}, "reference.kind: adapter_off is not the model at start"),
    (
        {"reference": {"kind": "server", "url": "http://host/v1", "cache": "file"}},
        "reference.cache: nothing is kept there unless",
    ),
    ({"reference": {"cache": "file"}}, "reference.cache: nothing is kept there unless reference.precompute is true"),
    (
        {"data": {"path": "d", "max_length": 2049}},
        "data.max_length: a pair of two sequences of 2049 tokens does not fit tokens_per_micro_batch=4096",
    ),
    ({"preference": {"loss": "kto"}, "data": {"path": "d", "batch_size": 1}}, "data.batch_size: kto measures"),
    ({"data": {"path": "d", "rows": "messages"}}, "data.rows: messages is a shape of supervised rows"),
    ({"evaluation": {"sets": {"a": {"path": "x", "rows": "text"}}}}, "evaluation.sets.a.rows: text is a shape of"),
    ({"data": {"path": "d", "train_on_prompt": True}}, "data.train_on_prompt: losses compare answers"),
    ({"data": {"path": "d", "overlong": "split"}}, "data.overlong: 'split' should be 'truncate', 'drop' or 'refuse'"),
    ({"data": {"path": "d", "average": "token_mean"}}, "data.average: 'token_mean' should be 'pair_mean'"),
    ({"data": {"path": "d", "packing": "wrapped"}}, "data.packing: 'wrapped' should be 'best_fit' or 'none'"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_what_cannot_work_is_refused_by_its_key(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(LEAST | change, DPOConfig)

    assert words in str(caught.value)


def test_a_tree_that_names_preferences_is_dpo_s() -> None:
    assert verb_of(LEAST) == "dpo"
    assert isinstance(run_from_mapping(LEAST), DPOConfig)
