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
from tests.messages import Said, assert_refused
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
    ({"preference": {"loss": []}}, "preference.loss"),
    (
        {"reference": {"precompute": True, "sync": {"every_steps": 1}}},
        "reference.sync reference.precompute",
    ),
    (
        {"preference": {"loss": "orpo"}, "reference": {"sync": {"every_steps": 1}}},
        "reference.sync preference.loss",
    ),
    (
        {"preference": {"loss": "kto"}, "reference": {"precompute": True}},
        "reference.precompute",
    ),
    ({"preference": {"loss": "dop"}}, "preference.loss 'dop'"),
    ({"preference": {"loss": {"kind": "ipo", "label_smoothing": 0.1}}}, "preference.loss.label_smoothing"),
    ({"preference": {"loss": {"label_smoothing": 0.5}}}, "preference.loss.label_smoothing"),
    (
        {"preference": {"loss": ["dpo", "kto"]}},
        "preference.loss",
    ),
    ({"preference": {"loss": ["dpo", "dpo"]}}, "preference.loss"),
    (
        {"preference": {"loss": "orpo"}, "reference": {"kind": "sharded"}},
        "reference.kind preference.loss",
    ),
    (
        {"preference": {"loss": "simpo"}, "reference": {"precompute": True}},
        "reference.precompute preference.loss",
    ),
    ({"reference": {"kind": "none"}}, "reference.kind none preference.loss"),
    ({"reference": {"kind": "adapter_off"}}, "reference.kind adapter_off"),
    (
        {"reference": {"kind": "server", "url": "http://host/v1", "cache": "file"}},
        "reference.cache",
    ),
    ({"reference": {"cache": "file"}}, "reference.cache reference.precompute"),
    (
        {"data": {"path": "d", "max_length": 2049}},
        "data.max_length 2049 tokens_per_micro_batch=4096",
    ),
    ({"preference": {"loss": "kto"}, "data": {"path": "d", "batch_size": 1}}, "data.batch_size"),
    ({"data": {"path": "d", "rows": "messages"}}, "data.rows messages"),
    ({"evaluation": {"sets": {"a": {"path": "x", "rows": "text"}}}}, "evaluation.sets.a.rows text"),
    ({"data": {"path": "d", "train_on_prompt": True}}, "data.train_on_prompt"),
    ({"data": {"path": "d", "overlong": "split"}}, "data.overlong 'split' 'truncate' 'drop'"),
    ({"data": {"path": "d", "average": "token_mean"}}, "data.average 'token_mean' 'pair_mean'"),
    ({"data": {"path": "d", "packing": "wrapped"}}, "data.packing 'wrapped' 'best_fit' 'none'"),
]


@pytest.mark.parametrize(("change", "named"), REFUSED)
def test_what_cannot_work_is_refused_by_its_key(change: dict[str, Any], named: str, said: Said) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(LEAST | change, DPOConfig)

    said(str(caught.value))
    assert_refused(str(caught.value), named)


def test_a_tree_that_names_preferences_is_dpo_s() -> None:
    assert verb_of(LEAST) == "dpo"
    assert isinstance(run_from_mapping(LEAST), DPOConfig)
