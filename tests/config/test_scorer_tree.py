"""The tree of `holdfast reward`: what it accepts, what it refuses, and how it is told from that of `holdfast dpo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.config.load import from_mapping
from holdfast.config.verbs.dpo import ScorerConfig
from holdfast.config.verbs.roots import load_run, verb_of
from holdfast.config.verbs.training import as_plain
from holdfast.config.yaml12 import to_yaml
from holdfast.errors import ConfigError
from tests.config.json_schema import accepts
from tests.messages import Said, assert_refused
from tests.trees import run_from_mapping

LEAST: dict[str, Any] = {
    "steps": 1,
    "model": {"path": "m"},
    "data": {"path": "d"},
    "preference": {"loss": "bradley_terry"},
}
SCHEMA = ScorerConfig.model_json_schema()


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"preference": {"loss": {"kind": "bradley_terry", "center": 0.01}}},
        {"preference": {"loss": [{"kind": "bradley_terry", "weight": 2.0}]}},
        {"model": {"path": "m", "lora": {"dora": True}}},
        {"data": {"path": "d", "shared_prompt": "off", "unusable": "drop", "packing": "none"}},
    ],
)
def test_the_tree_and_its_schema_accept(change: dict[str, Any]) -> None:
    config = from_mapping(LEAST | change, ScorerConfig)

    assert accepts(SCHEMA, LEAST | change)
    assert from_mapping(as_plain(config), ScorerConfig) == config
    assert type(run_from_mapping(as_plain(config))) is ScorerConfig


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"preference": {"loss": "dpo"}}, "preference.loss 'dpo' bradley_terry"),
        ({"preference": {"loss": "bradley_terry", "sft": 1.0}}, "preference.sft"),
        ({"reference": {"precompute": True}}, "reference.precompute bradley_terry"),
        (
            {"evaluation": {"sets": {"a": {"path": "x"}}, "completions": {"samples": 3}}},
            "evaluation.completions",
        ),
        ({"preference": {}}, "preference.loss"),
    ],
)
def test_what_policies_have_is_refused(change: dict[str, Any], named: str, said: Said) -> None:
    with pytest.raises(ConfigError) as refused:
        from_mapping(LEAST | change, ScorerConfig)

    said(str(refused.value))
    assert_refused(str(refused.value), named)


@pytest.mark.parametrize(
    ("loss", "verb"),
    [
        ("bradley_terry", "reward"),
        ({"kind": "bradley_terry", "center": 0.1}, "reward"),
        (["bradley_terry"], "reward"),
        ([{"kind": "bradley_terry"}], "reward"),
        ("dpo", "dpo"),
        ("my_bradley_terry.py:loss", "dpo"),
        ({"kind": "path", "path": "my_bradley_terry.py:loss"}, "dpo"),
        ([{"kind": "path", "path": "losses/bradley_terry.py:loss"}, "ipo"], "dpo"),
        (None, "dpo"),
        ([], "dpo"),
        (3, "dpo"),
    ],
)
def test_the_loss_tells_the_verb(loss: Any, verb: str) -> None:
    assert verb_of(LEAST | {"preference": {"loss": loss}}) == verb


@pytest.mark.parametrize("preference", [{}, None, "dpo", []])
def test_preferences_without_a_loss_are_those_of_dpo(preference: Any) -> None:
    assert verb_of(LEAST | {"preference": preference}) == "dpo"


@pytest.mark.parametrize(
    ("loss", "overrides", "verb"),
    [
        ("dpo", ["preference.loss=my_bradley_terry.py:loss"], "dpo"),
        ("dpo", ["preference.loss=bradley_terry"], "reward"),
        ("bradley_terry", ["preference.loss=ipo"], "dpo"),
        ("bradley_terry", [], "reward"),
    ],
)
def test_a_file_is_read_under_the_verb_that_its_overrides_leave(
    loss: str, overrides: list[str], verb: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(LEAST | {"preference": {"loss": loss}}))

    assert load_run(file, overrides).config.verb == verb
