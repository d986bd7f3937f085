"""The tree of `holdfast grpo`: what it accepts, what it refuses, and in which words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.config.load import from_mapping
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.roots import verb_of
from holdfast.errors import ConfigError
from tests.config.json_schema import accepts
from tests.messages import Said, assert_refused
from tests.trees import run_from_mapping

LEAST: dict[str, Any] = {
    "steps": 1,
    "model": {"path": "m"},
    "data": {"path": "d"},
    "reward": "exact",
}
PPO: dict[str, Any] = {"advantage": "gae", "critic": {}}
TURNS: dict[str, Any] = {"environment": {"path": "w.py:W"}, "advantage": {"turns": "discounted"}}
SCHEMA = GRPOConfig.model_json_schema()

TAKEN: list[dict[str, Any]] = [
    {},
    {"reward": {"kind": "exact", "column": "gold"}},
    {"reward": ["exact", {"path": "f.py:g", "weight": 0.5}]},
    {"reward": {"path": "f.py:g"}},
    {"reward": "f.py:g"},
    {"reward": ["exact", "f.py:g"]},
    {"objective": {"high": 0.28}},
    {"objective": "cispo"},
    {"objective": "gspo", "data": {"path": "d", "average": "sequence_mean"}},
    {"advantage": {"kind": "pass_at_k", "k": 4}},
    {"advantage": "remax", "rollout": {"group_size": 1}},
    {"rollout": {"top_p": 0.9}, "correction": "truncate"},
    {"groups": {"flat": "resample", "between": {"reward": "exact", "low": 0.1, "high": 0.9}}},
    {"updates": {"mini_batches": 4, "passes": 2}},
    {"kl": {"coefficient": 0.05, "where": "reward"}, "reference": {"kind": "offloaded"}},
    {"advantage": "gae", "critic": {}, "rollout": {"group_size": 1}},
    {
        "advantage": {"kind": "gae", "gamma": 0.99, "lam": 1.0, "whiten": False},
        "critic": {"path": "v", "value_clip": None},
    },
    {"kl": {"coefficient": 0.05}, "reference": {"kind": "server", "url": "http://host:8000/v1", "bound": None}},
    {"evaluation": {"sets": {"a": {"path": "x"}}, "per_prompt": 4, "sampling": {"temperature": 0.7}}},
    {"kl": {"coefficient": 0.05}, "reference": {"sync": {"every_steps": 512, "mix": 1}}},
    {"residency": {"parameters": "host", "optimizer": "host"}},
    {"environment": {"path": "w.py:W"}, "advantage": {"turns": "discounted", "discount": 0.9}},
]


@pytest.mark.parametrize("change", TAKEN)
def test_the_tree_and_its_schema_accept(change: dict[str, Any]) -> None:
    from_mapping(LEAST | change, GRPOConfig)

    assert accepts(SCHEMA, LEAST | change)


def test_a_function_alone_stands_for_its_section() -> None:
    short, long = (from_mapping(LEAST | {"reward": of}, GRPOConfig) for of in ("f.py:g", {"path": "f.py:g"}))

    assert short == long


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"evaluation": {"sets": {"a": {"path": "x"}}, "completions": {"samples": 3}}},
        "evaluation.completions 'samples' 3",
    ),
    ({"reward": []}, "reward"),
    (
        {"kl": {"coefficient": 0.05}, "reference": {"kind": "adapter_off", "sync": {"every_steps": 1}}},
        "reference.sync adapter_off",
    ),
    ({"reference": {"kind": "none", "sync": {"every_steps": 1}}}, "reference.sync"),
    ({"reference": {"sync": {"every_steps": 1}}}, "reference.sync kl.coefficient 0"),
    ({"reference": {"sync": {"every_steps": 1, "mix": 0}}}, "reference.sync.mix 0"),
    (
        {"residency": {"parameters": "host"}, "parallel": {"cpu_offload": True}},
        "residency.parameters parallel.offload",
    ),
    (
        {"residency": {"optimizer": "host"}, "parallel": {"offload": ["optimizer"]}},
        "residency.optimizer parallel.offload",
    ),
    ({"residency": {"optimizer": "disk"}}, "residency.optimizer 'disk' 'stay' 'host'"),
    ({"reference": {"sync": {}}}, "reference.sync.every_steps"),
    ({"reference": {"ref_model_sync_steps": 4}}, "reference.ref_model_sync_steps reference.sync.every_steps"),
    (
        {
            "kl": {"coefficient": 0.05},
            "reference": {"kind": "server", "url": "http://host:8000/v1", "sync": {"every_steps": 1}},
        },
        "reference.sync",
    ),
    ({"reward": "exat"}, "reward 'exat'"),
    ({"reward": {"kind": "exact", "colum": "x"}}, "reward.colum column"),
    ({"reward": ["exact", {"kind": "exact", "colum": "x"}]}, "reward.1.colum column"),
    ({"reward": ["exact", "exact"]}, "reward"),
    ({"rollout": {"group_size": 1}}, "rollout.group_size 1 2"),
    (
        {"advantage": {"kind": "pass_at_k", "k": 8}},
        "rollout.group_size 8 pass_at_k 9",
    ),
    (
        {"rewards": {"step_timeout_seconds": 900}, "launch": {"timeout_minutes": 15}},
        "rewards.step_timeout_seconds 900 launch.timeout_minutes=15",
    ),
    ({"rollout": {"temperature": 0}}, "rollout.temperature 0"),
    ({"rollout": {"temperature": 1e-30}}, "rollout.temperature 1e-30"),
    ({"rollout": {"stop": ["a", ""]}}, "rollout.stop"),
    ({"rollout": {"top_k": 5, "min_p": 0.1}}, "rollout.top_k top_k min_p"),
    (
        {"rollout": {"top_p": 0.9}, "correction": {"kind": "truncate", "level": "sequence"}},
        "correction.level top_p",
    ),
    (
        {"rollout": {"min_p": 0.1}, "correction": {"kind": "mask", "level": "sequence"}},
        "correction.level min_p",
    ),
    (
        {"rollout": {"top_k": 5}, "correction": {"kind": "mask", "weighted": False}},
        "correction.weighted top_k",
    ),
    ({"updates": {"mini_batches": 5}}, "updates.mini_batches data.batch_size=32 5"),
    ({"objective": "gspo"}, "data.average token_mean"),
    ({"data": {"path": "d", "overlong": "truncate"}}, "data.overlong 'truncate' 'drop' 'refuse'"),
    (
        {"data": {"path": "d", "train_on_prompt": True}},
        "data.train_on_prompt",
    ),
    ({"data": {"path": "d", "append_eos": False}}, "data.append_eos"),
    ({"data": {"path": "d", "rows": "text"}}, "data.rows text"),
    ({"rollout": {"max_new_tokens": 1024}}, "rollout.max_new_tokens data.max_length=1024"),
    (
        {"groups": {"between": {"reward": "r", "low": 0.9, "high": 0.1}}},
        "groups.between.low 0.9 high=0.1",
    ),
    ({"groups": {"between": {"reward": "r"}}}, "groups.between.low"),
    (
        {"data": {"path": "d", "batch_size_schedule": {"5": 64}}},
        "data.batch_size_schedule",
    ),
    (
        {"kl": {"coefficient": 0.1, "estimator": "k1"}},
        "kl.estimator",
    ),
    ({"model": {"path": "m", "dropout": True}}, "model.dropout"),
    ({"model": {"path": "m", "lora": {"dropout": 0.1}}}, "model.lora.dropout"),
    (
        {"groups": {"between": {"reward": "exat", "low": 0.1}}},
        "groups.between.reward",
    ),
    ({"groups": {"flat": "drop"}, "advantage": "reinforce_pp"}, "groups.flat drop"),
    ({"groups": {"flat": "resample"}, "limit_batches": 3}, "groups.flat resample"),
    (
        {"kl": {"coefficient": 0.1}, "checkpoint": {"init_from": "runs/a/checkpoints/step-00000001"}},
        "checkpoint.init_from model.path",
    ),
    (
        {"objective": {"kind": "path", "path": "f.py:g"}, "kl": {"coefficient": 0.1}},
        "kl objective.path",
    ),
    (
        {"objective": "clip_cov", "kl": {"coefficient": 0.1, "where": "reward_to_go"}},
        "kl.where clip_cov",
    ),
    ({"advantage": {"turns": "discounted"}}, "advantage.turns"),
    ({"advantage": {"discount": 0.9}}, "advantage.discount"),
    (TURNS | {"objective": "gspo"}, "objective.kind"),
    (
        TURNS | {"advantage": {"turns": "discounted", "combine": "normalise_then_sum"}},
        "advantage.combine normalise_then_sum",
    ),
    ({"advantage": "gae"}, "critic"),
    (
        {"critic": {}},
        "critic",
    ),
    ({"critic": {"optim": {"kind": "sgdd"}}}, "critic.optim 'sgdd'"),
    (PPO | {"critic": {"warmup_steps": 1}}, "critic.warmup_steps 1"),
    (PPO | {"critic": {"optim": {"ema": {}}}}, "critic.optim.ema"),
    (PPO | {"critic": {"optim": {"kind": "adamw_bf16"}}}, "critic.optim.kind optim.kind adamw_bf16"),
    (PPO | {"groups": {"flat": "drop"}}, "groups.flat drop"),
    (PPO | {"kl": {"coefficient": 0.1, "where": "reward_to_go"}}, "kl.where"),
    (
        PPO | {"objective": "gspo", "data": {"path": "d", "average": "sequence_mean"}},
        "objective.kind",
    ),
    ({"kl": {"coefficient": 0.1}, "reference": {"kind": "none"}}, "reference.kind none kl.coefficient=0.1"),
    (
        {"kl": {"coefficient": 0.1}, "reference": {"kind": "adapter_off"}},
        "reference.kind adapter_off",
    ),
    ({"reference": "server"}, "reference.url"),
    ({"reference": {"kind": "server", "url": "host:8000"}}, "reference.url 'host:8000'"),
    (
        {"reference": {"kind": "server", "url": "http://a..b:8000/v1"}},
        "reference.url 'http://a..b:8000/v1' 'a..b'",
    ),
    (
        {"reference": {"kind": "server", "url": "http://host:99999/v1"}},
        "reference.url 1 65535",
    ),
    ({"reference": {"kind": "server", "url": "http://host:0/v1"}}, "reference.url 1"),
    ({"reference": {"kind": "server", "url": "http://host:port/v1"}}, "reference.url 'http://host:port/v1'"),
    (
        {"reference": {"kind": "server", "url": "http://host/v1", "api_key_variable": "sk-1 2"}},
        "reference.api_key_variable",
    ),
    (
        {"reference": {"kind": "sharded", "url": "http://host/v1"}},
        "reference.url adapter_off",
    ),
    ({"reference": {"kind": "served"}}, "reference 'served'"),
    (
        {
            "kl": {"coefficient": 0.1},
            "reference": {"kind": "server", "url": "http://host/v1"},
            "rollout": {"temperature": 0.7},
        },
        "reference.kind 1 rollout.temperature=0.7",
    ),
]


@pytest.mark.parametrize(("change", "named"), REFUSED)
def test_what_cannot_work_is_refused_by_its_key(change: dict[str, Any], named: str, said: Said) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(LEAST | change, GRPOConfig)

    said(str(caught.value))
    assert_refused(str(caught.value), named)


def test_a_tree_that_names_rewards_or_rollouts_is_a_policy_s() -> None:
    assert verb_of(LEAST) == "grpo"
    assert verb_of({"rollout": {}}) == "grpo"
    assert verb_of({"data": {}, "model": {}}) == "sft"
    assert isinstance(run_from_mapping(LEAST), GRPOConfig)


@pytest.mark.parametrize(
    "url", ["http://me:p@planted@h:9/v1", "https://planted@h/v1", "http://me:planted/x@h/v1", "me:planted@h:8000"]
)
@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("reward.url", {"reward": {"kind": "judge", "model": "m", "prompt": "{completion}"}}),
        ("reference.url", {"reference": {"kind": "server"}}),
        ("rollout.engine.url", {"rollout": {"engine": {"kind": "vllm"}}}),
    ],
)
def test_an_address_with_a_password_is_refused_without_it(key: str, sections: dict[str, Any], url: str) -> None:
    tree = json.loads(json.dumps(LEAST | sections))
    section = tree["rollout"]["engine"] if "rollout" in tree else tree[key.partition(".")[0]]
    section["url"] = url

    with pytest.raises(ConfigError) as raised:
        from_mapping(tree, GRPOConfig)

    assert f"{key}: " in str(raised.value)
    assert "api_key_variable" in str(raised.value)
    assert "planted" not in str(raised.value)
