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
        "evaluation.completions: {'samples': 3} has no use for this command; remove it, or write null",
    ),
    ({"reward": []}, "reward: this list is empty; name at least one"),
    (
        {"kl": {"coefficient": 0.05}, "reference": {"kind": "adapter_off", "sync": {"every_steps": 1}}},
        "reference.sync: the reference is the policy's own frozen weights (reference: adapter_off), so nothing can",
    ),
    ({"reference": {"kind": "none", "sync": {"every_steps": 1}}}, "reference.sync: there is no reference (reference: "),
    ({"reference": {"sync": {"every_steps": 1}}}, "reference.sync: kl.coefficient is 0, so no reference can follow"),
    ({"reference": {"sync": {"every_steps": 1, "mix": 0}}}, "reference.sync.mix: 0 should be greater than 0"),
    (
        {"residency": {"parameters": "host"}, "parallel": {"cpu_offload": True}},
        "residency.parameters: parallel.offload keeps them in host memory all the time; leave it out",
    ),
    (
        {"residency": {"optimizer": "host"}, "parallel": {"offload": ["optimizer"]}},
        "residency.optimizer: parallel.offload keeps them in host memory all the time; leave it out",
    ),
    ({"residency": {"optimizer": "disk"}}, "residency.optimizer: 'disk' should be 'stay' or 'host'"),
    ({"reference": {"sync": {}}}, "reference.sync.every_steps: required, and missing"),
    ({"reference": {"ref_model_sync_steps": 4}}, "unknown key; it is called reference.sync.every_steps here"),
    (
        {
            "kl": {"coefficient": 0.05},
            "reference": {"kind": "server", "url": "http://host:8000/v1", "sync": {"every_steps": 1}},
        },
        "reference.sync: kind server has no such key; it belongs to kind auto",
    ),
    ({"reward": "exat"}, "reward: there is no kind 'exat'. Did you mean exact?"),
    ({"reward": {"kind": "exact", "colum": "x"}}, "reward.colum: unknown key; did you mean column?"),
    ({"reward": ["exact", {"kind": "exact", "colum": "x"}]}, "reward.1.colum: unknown key; did you mean column?"),
    ({"reward": ["exact", "exact"]}, "reward: two rewards are called exact"),
    ({"rollout": {"group_size": 1}}, "rollout.group_size: 1, but advantage: grpo compares at least 2"),
    (
        {"advantage": {"kind": "pass_at_k", "k": 8}},
        "rollout.group_size: 8, but advantage: pass_at_k compares at least 9",
    ),
    (
        {"rewards": {"step_timeout_seconds": 900}, "launch": {"timeout_minutes": 15}},
        "rewards.step_timeout_seconds: 900 is not below launch.timeout_minutes=15 (900 s)",
    ),
    ({"rollout": {"temperature": 0}}, "rollout.temperature: 0 gives every completion of a group the same tokens"),
    ({"rollout": {"temperature": 1e-30}}, "rollout.temperature: 1e-30 divides logits beyond the range of numbers"),
    ({"rollout": {"stop": ["a", ""]}}, "rollout.stop: every text holds the empty one"),
    ({"rollout": {"top_k": 5, "min_p": 0.1}}, "rollout.top_k: top_k, min_p draws from another distribution"),
    (
        {"rollout": {"top_p": 0.9}, "correction": {"kind": "truncate", "level": "sequence"}},
        "correction.level: top_p draws from another distribution than the policy's",
    ),
    (
        {"rollout": {"min_p": 0.1}, "correction": {"kind": "mask", "level": "sequence"}},
        "correction.level: min_p draws from another distribution than the policy's",
    ),
    (
        {"rollout": {"top_k": 5}, "correction": {"kind": "mask", "weighted": False}},
        "correction.weighted: top_k draws from another distribution than the policy's",
    ),
    ({"updates": {"mini_batches": 5}}, "updates.mini_batches: data.batch_size=32 prompts cannot be dealt to 5"),
    ({"objective": "gspo"}, "data.average: token_mean weighs sequences by their length"),
    ({"data": {"path": "d", "overlong": "truncate"}}, "data.overlong: 'truncate' should be 'drop' or 'refuse'"),
    (
        {"data": {"path": "d", "train_on_prompt": True}},
        "data.train_on_prompt: a rollout is trained on what",
    ),
    ({"data": {"path": "d", "append_eos": False}}, "data.append_eos: a rollout is trained on what"),
    ({"data": {"path": "d", "rows": "text"}}, "data.rows: text is a shape of supervised rows"),
    ({"rollout": {"max_new_tokens": 1024}}, "leaves no room for a prompt in data.max_length=1024"),
    (
        {"groups": {"between": {"reward": "r", "low": 0.9, "high": 0.1}}},
        "groups.between.low: 0.9 is not below high=0.1",
    ),
    ({"groups": {"between": {"reward": "r"}}}, "groups.between.low: neither low nor high is set"),
    (
        {"data": {"path": "d", "batch_size_schedule": {"5": 64}}},
        "data.batch_size_schedule: a rollout batch has one size",
    ),
    (
        {"kl": {"coefficient": 0.1, "estimator": "k1"}},
        "kl.estimator: the gradient of k1 in the loss is zero on average",
    ),
    ({"model": {"path": "m", "dropout": True}}, "model.dropout: a ratio compares two forward passes"),
    ({"model": {"path": "m", "lora": {"dropout": 0.1}}}, "model.lora.dropout: a ratio compares two forward passes"),
    (
        {"groups": {"between": {"reward": "exat", "low": 0.1}}},
        "groups.between.reward: exat is none of the rewards exact",
    ),
    ({"groups": {"flat": "drop"}, "advantage": "reinforce_pp"}, "groups.flat: drop leaves out groups whose rewards"),
    ({"groups": {"flat": "resample"}, "limit_batches": 3}, "groups.flat: resample draws more prompts than a batch has"),
    (
        {"kl": {"coefficient": 0.1}, "checkpoint": {"init_from": "runs/a/checkpoints/step-00000001"}},
        "checkpoint.init_from: the reference policy would be model.path without these weights",
    ),
    (
        {"objective": {"kind": "path", "path": "f.py:g"}, "kl": {"coefficient": 0.1}},
        "kl: a loss of your own (objective.path) takes nothing from this section",
    ),
    (
        {"objective": "clip_cov", "kl": {"coefficient": 0.1, "where": "reward_to_go"}},
        "kl.where: clip_cov chooses tokens by advantages, before the KL is taken from them; use loss",
    ),
    ({"advantage": {"turns": "discounted"}}, "advantage.turns: a single answer has no turns; set environment, or"),
    ({"advantage": {"discount": 0.9}}, "advantage.discount: all turns have the reward of their episode; set turns:"),
    (TURNS | {"objective": "gspo"}, "objective.kind: gspo is one term per sequence, and turns: discounted is one per"),
    (
        TURNS | {"advantage": {"turns": "discounted", "combine": "normalise_then_sum"}},
        "advantage.combine: normalise_then_sum scales rewards of whole episodes; leave it out with turns: discounted",
    ),
    ({"advantage": "gae"}, "critic: advantage: gae compares with what a critic expects, and there is none"),
    (
        {"critic": {}},
        "critic: advantage: grpo compares completions with each other and asks no critic; use advantage: gae",
    ),
    ({"critic": {"optim": {"kind": "sgdd"}}}, "critic.optim: there is no kind 'sgdd'. Did you mean sgd?"),
    (PPO | {"critic": {"warmup_steps": 1}}, "critic.warmup_steps: 1 leaves the policy none of 1 steps"),
    (PPO | {"critic": {"optim": {"ema": {}}}}, "critic.optim.ema: nothing evaluates or exports averages of a critic"),
    (PPO | {"critic": {"optim": {"kind": "adamw_bf16"}}}, "critic.optim.kind: with optim.kind: adamw_bf16 needs"),
    (PPO | {"groups": {"flat": "drop"}}, "groups.flat: drop leaves out groups whose rewards"),
    (PPO | {"kl": {"coefficient": 0.1, "where": "reward_to_go"}}, "kl.where: advantage: gae passes rewards back"),
    (
        PPO | {"objective": "gspo", "data": {"path": "d", "average": "sequence_mean"}},
        "objective.kind: gspo is one term per sequence, and advantage: gae is one per token",
    ),
    ({"kl": {"coefficient": 0.1}, "reference": {"kind": "none"}}, "reference.kind: none, but kl.coefficient=0.1"),
    (
        {"kl": {"coefficient": 0.1}, "reference": {"kind": "adapter_off"}},
        "reference.kind: adapter_off is not the model",
    ),
    ({"reference": "server"}, "reference.url: required, and missing"),
    ({"reference": {"kind": "server", "url": "host:8000"}}, "reference.url: 'host:8000' is no address; write it as in"),
    (
        {"reference": {"kind": "server", "url": "http://a..b:8000/v1"}},
        "reference.url: 'http://a..b:8000/v1' is no address: 'a..b' is no name of a host; write it as in",
    ),
    (
        {"reference": {"kind": "server", "url": "http://host:99999/v1"}},
        "is no address: its port is no whole number from 1 to 65535; write it as in",
    ),
    ({"reference": {"kind": "server", "url": "http://host:0/v1"}}, "is no address: ports begin with 1; write it as in"),
    ({"reference": {"kind": "server", "url": "http://host:port/v1"}}, "reference.url: 'http://host:port/v1' is no"),
    (
        {"reference": {"kind": "server", "url": "http://host/v1", "api_key_variable": "sk-1 2"}},
        "reference.api_key_variable: this is no name of a variable",
    ),
    (
        {"reference": {"kind": "sharded", "url": "http://host/v1"}},
        "reference.url: kind auto or none or adapter_off or sharded or offloaded has no such key; it belongs to kind "
        "server",
    ),
    ({"reference": {"kind": "served"}}, "reference: there is no kind 'served'. Did you mean server?"),
    (
        {
            "kl": {"coefficient": 0.1},
            "reference": {"kind": "server", "url": "http://host/v1"},
            "rollout": {"temperature": 0.7},
        },
        "reference.kind: a server tells log-probabilities at temperature 1, and rollout.temperature=0.7 is that of",
    ),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_what_cannot_work_is_refused_by_its_key(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(LEAST | change, GRPOConfig)

    assert words in str(caught.value)


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
