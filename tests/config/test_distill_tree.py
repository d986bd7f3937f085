"""The tree of `holdfast distill`: what it accepts, what it refuses, and how its file is known."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.config.load import from_mapping
from holdfast.config.verbs.distill import DistillConfig
from holdfast.config.verbs.roots import verb_of
from holdfast.config.verbs.training import as_plain
from holdfast.errors import ConfigError
from tests.config.json_schema import accepts
from tests.messages import Said, assert_refused
from tests.trees import run_from_mapping

LEAST: dict[str, Any] = {"steps": 1, "model": {"path": "m"}, "data": {"path": "d"}, "teacher": {"path": "t"}}
SCHEMA = DistillConfig.model_json_schema()
SAMPLED = {"loss": "sampled_reverse_kl"}
SERVED = {"teacher": {"kind": "server", "url": "http://host:8000/v1"}}
ASKED = SERVED | {"distill": SAMPLED, "rollout": {}}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"distill": {"loss": {"kind": "jsd", "beta": 0.1}, "temperature": 2.0, "sft_weight": 0.5}},
        {"distill": {"loss": "reverse_kl"}, "teacher": {"path": "t", "kind": "offloaded", "dtype": "bfloat16"}},
        {"rollout": {"share": 0.5, "max_new_tokens": 64}, "distill": {"sft_weight": 1.0}},
        {"rollout": {"temperature": 0.8}, "distill": SAMPLED | {"temperature": 0.8}},
        {"teacher": [{"path": "t", "weight": 0.7}, {"path": "u", "kind": "offloaded", "weight": 2}]},
        ASKED,
        ASKED | {"teacher": SERVED["teacher"] | {"model": "large", "answers": "echo", "requests": 4}},
    ],
)
def test_the_tree_and_its_schema_accept(change: dict[str, Any]) -> None:
    config = from_mapping(LEAST | change, DistillConfig)

    assert accepts(SCHEMA, LEAST | change)
    assert from_mapping(as_plain(config), DistillConfig) == config
    assert type(run_from_mapping(as_plain(config))) is DistillConfig


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"teacher": {}}, "teacher.path"),
        ({"distill": {"loss": {"kind": "jsd", "beta": 1.5}}}, "distill.loss.beta"),
        ({"distill": {"loss": {"kind": "forward_kl", "beta": 0.5}}}, "distill.loss.beta"),
        (
            {"distill": SAMPLED},
            "distill.loss",
        ),
        ({"distill": SAMPLED, "rollout": {"share": 0.5}}, "distill.loss rollout.share=0.5 reverse_kl"),
        (
            {"distill": SAMPLED, "rollout": {"temperature": 0.5}},
            "distill.temperature",
        ),
        ({"distill": SAMPLED, "rollout": {"top_p": 0.9}}, "rollout.top_p"),
        ({"distill": {"sft_weight": 0.1}, "rollout": {}}, "distill.sft_weight 0.1 rollout.share=1"),
        ({"rollout": {"share": 0}}, "rollout.share"),
        ({"rollout": {"max_new_tokens": 1024}}, "rollout.max_new_tokens 1024"),
        ({"rollout": {}, "data": {"path": "d", "packing": "wrapped"}}, "data.packing wrapped"),
        ({"rollout": {}, "data": {"path": "d", "overlong": "split"}}, "data.overlong split"),
        ({"rollout": {}, "data": {"path": "d", "train_on_prompt": True}}, "data.train_on_prompt"),
        *(
            (
                SERVED | {"distill": {"loss": kind}, "rollout": {}},
                f"teacher.kind distill.loss {kind} sampled_reverse_kl",
            )
            for kind in ("jsd", "forward_kl", "reverse_kl")
        ),
        (SERVED | {"distill": SAMPLED}, "distill.loss rollout"),
        (
            ASKED | {"distill": SAMPLED | {"temperature": 0.8}, "rollout": {"temperature": 0.8}},
            "teacher.kind distill.temperature=0.8",
        ),
        (ASKED | {"rollout": {"temperature": 0.8}}, "teacher.kind rollout.temperature=0.8"),
        (ASKED | {"teacher": {"kind": "server"}}, "teacher.url"),
        (ASKED | {"teacher": {"kind": "server", "url": "host:8000"}}, "teacher.url 'host:8000'"),
        (
            ASKED | {"teacher": SERVED["teacher"] | {"path": "t"}},
            "teacher.path server sharded",
        ),
        (
            {"teacher": {"path": "t", "url": "http://host/v1"}},
            "teacher.url sharded server",
        ),
        ({"teacher": {"path": "t", "kind": "shared"}}, "teacher 'shared' sharded"),
        ({"teacher": {"path": "t", "weight": 0}}, "teacher.weight"),
        ({"teacher": []}, "teacher"),
        ({"teacher": [{"path": "t"}, {}]}, "teacher.1.path"),
        ({"teacher": [{"path": "t"}, SERVED["teacher"]]}, "teacher.kind jsd"),
        ({"teacher": [{"path": "t"}, {"path": "u"}], "distill": SAMPLED, "rollout": {}}, "teacher sampled_reverse_kl"),
        ({"teacher": {"path": "t", "weight": 2}, "distill": SAMPLED, "rollout": {}}, "teacher sampled_reverse_kl"),
        (ASKED | {"teacher": [SERVED["teacher"], SERVED["teacher"]]}, "teacher sampled_reverse_kl"),
        (
            ASKED
            | {"data": {"path": "d", "validation_split": 0.1}}
            | {"checkpoint": {"export_best": {"metric": "eval/validation/divergence", "mode": "min"}}},
            "checkpoint.export_best.metric eval/validation/divergence",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(change: dict[str, Any], named: str, said: Said) -> None:
    with pytest.raises(ConfigError) as refused:
        from_mapping(LEAST | change, DistillConfig)

    said(str(refused.value))
    assert_refused(str(refused.value), named)


def test_a_teacher_tells_the_verb_whoever_writes_the_texts() -> None:
    assert verb_of(LEAST) == "distill"
    assert verb_of(LEAST | {"rollout": {"max_new_tokens": 4}}) == "distill"
    assert verb_of({"distill": {"loss": "jsd"}, "model": {"path": "m"}}) == "distill"
    assert verb_of({key: value for key, value in LEAST.items() if key != "teacher"}) == "sft"
