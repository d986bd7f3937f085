"""Secrets planted in every free place of the whole configuration tree, of every verb."""

from __future__ import annotations

import json
import random
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from holdfast.checkpoint.export.about import Exported
from holdfast.checkpoint.export.card import card_of
from holdfast.cli.commands.push import outgoing_files
from holdfast.config.base import LEFT_OUT, keys_of, leaves
from holdfast.config.load import from_mapping
from holdfast.config.public import HASHED, WHOLE, public_configuration
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.verbs.training import as_plain
from holdfast.config.yaml12 import parse_text, to_yaml
from holdfast.features.report.settings import flat_public

PLANTED = re.compile("planted[0-9a-f]{16}")
PUBLIC = """
    AdamWConfig.groups AdamWConfig.no_decay AdamW8bitConfig.groups AdamW8bitConfig.no_decay AdamWBF16Config.groups
    AdamWBF16Config.no_decay MuonConfig.adamw MuonConfig.groups MuonConfig.no_decay SGDConfig.groups SGDConfig.no_decay
    ParameterGroupConfig.match PlateauSchedule.metric UserOptimizerConfig.groups UserOptimizerConfig.no_decay
    UserOptimizerConfig.path
    BestConfig.metric MetricConfig.metric PatienceConfig.metric BetweenConfig.reward
    InitConfig.path CheckpointConfig.storage ResumeConfig.add ResumeConfig.cast ResumeConfig.drop
    ResumeConfig.freeze ResumeConfig.from ResumeConfig.unfreeze
    CodeConfig.column CodeConfig.name CountdownConfig.name CountdownConfig.numbers CountdownConfig.target
    EnvironmentRewardConfig.name ExactConfig.column ExactConfig.name FormatConfig.name FormatConfig.regex
    JudgeConfig.model JudgeConfig.name JudgeConfig.prompt JudgeConfig.regex JudgeConfig.url LengthConfig.name
    MathConfig.column MathConfig.name ModelRewardConfig.name ModelRewardConfig.path OverlongConfig.name
    RepetitionConfig.name UserRewardConfig.name UserRewardConfig.path
    CriticConfig.freeze CriticConfig.path CriticOptimConfig.groups
    DataConfig.chat_template DataConfig.columns DataConfig.config_name DataConfig.filter DataConfig.format
    DataConfig.image_dir DataConfig.name DataConfig.path DataConfig.revision DataConfig.system
    PairDataConfig.chat_template PairDataConfig.columns PairDataConfig.config_name PairDataConfig.filter
    PairDataConfig.format PairDataConfig.image_dir PairDataConfig.name PairDataConfig.path PairDataConfig.revision
    PairDataConfig.system
    PromptDataConfig.chat_template PromptDataConfig.columns PromptDataConfig.config_name PromptDataConfig.filter
    PromptDataConfig.format PromptDataConfig.image_dir PromptDataConfig.name PromptDataConfig.path
    PromptDataConfig.revision PromptDataConfig.system
    SourceConfig.columns SourceConfig.config_name SourceConfig.name SourceConfig.path SourceConfig.revision
    DistillRolloutConfig.stop EvaluationSamplingConfig.stop RolloutConfig.stop
    AgentEndpointConfig.address SandboxConfig.image
    EnvironmentConfig.action EnvironmentConfig.path EnvironmentConfig.tools AgentConfig.run
    EvaluationConfig.sets PolicyEvaluationConfig.sets
    LoRAConfig.exclude LoRAConfig.experts LoRAConfig.path LoRAConfig.ranks LoRAConfig.targets LoRAConfig.train
    ModelConfig.freeze ModelConfig.path ModelConfig.revision ModelConfig.tokenizer ParallelConfig.units
    SFTConfig.observers DPOConfig.observers ScorerConfig.observers GRPOConfig.observers DistillConfig.observers
    PairReferenceConfig.cache PairServerReferenceConfig.cache PairServerReferenceConfig.model
    PairServerReferenceConfig.url ServerReferenceConfig.model ServerReferenceConfig.url ServerTeacherConfig.model
    ServerTeacherConfig.url TeacherConfig.path TeacherConfig.revision TeacherConfig.tokenizer
    RecordedEngineConfig.path RunConfig.dir RunConfig.name
    UserAdvantageConfig.path UserEngineConfig.path UserLossConfig.path UserObjectiveConfig.path UserTrackerConfig.path
    VLLMEngineConfig.folder VLLMEngineConfig.model VLLMEngineConfig.python VLLMEngineConfig.url VLLMEngineConfig.version
"""
"""Keys whose texts may leave a run. A key belongs here only if nobody has a reason to write a secret there."""
SECRET = """
    AgentConfig.command AgentConfig.kwargs EnvironmentConfig.kwargs EnvironmentConfig.mcp StartConfig.arguments
    UserAdvantageConfig.kwargs
    UserEngineConfig.kwargs UserLossConfig.kwargs UserObjectiveConfig.kwargs UserOptimizerConfig.kwargs
    UserRewardConfig.kwargs UserTrackerConfig.kwargs
    ModelConfig.config ModelConfig.config_override ModelConfig.image_processor
    DataConfig.template_kwargs PairDataConfig.template_kwargs PromptDataConfig.template_kwargs
    JudgeConfig.api_key_variable PairServerReferenceConfig.api_key_variable ServerReferenceConfig.api_key_variable
    ServerTeacherConfig.api_key_variable VLLMEngineConfig.api_key_variable
"""
"""All other keys that take texts."""


def sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield every section that a key can hold, and those below it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from sections(field.annotation)
    for argument in typing.get_args(annotation):
        yield from sections(argument)


def holds_texts(annotation: Any) -> bool:
    """Whether a value may be a text, outside of the sections below it."""
    if typing.get_origin(annotation) is typing.Literal:
        return False
    return annotation in {str, Any} or any(map(holds_texts, typing.get_args(annotation)))


class Planter:
    """Fills a tree: addresses with passwords in public texts, secrets under harmless names in all other places."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.secrets: list[str] = []

    def secret(self) -> str:
        self.secrets.append(f"planted{self._random.getrandbits(64):016x}")
        return self.secrets[-1]

    def address(self) -> str:
        scheme = self._random.choice(["https", "http", "s3", "postgres", "git+ssh"])
        address = f"{scheme}://me:{self.secret()}@host.example:8000/v1?a={self.secret()}#{self.secret()}"
        return self._random.choice([address, f"Ask {address} for it", f'{{"at": "{address}"}}'])

    def text(self, key: str) -> str:
        return self.address() if key in PUBLIC.split() else self.secret()

    def value(self, annotation: Any, key: str) -> Any:
        arguments = typing.get_args(annotation)
        match typing.get_origin(annotation):
            case typing.Annotated:
                return self.value(arguments[0], key)
            case typing.Union | types.UnionType:
                return self.value(self._random.choice([each for each in arguments if each is not type(None)]), key)
            case typing.Literal:
                return self._random.choice(arguments)
            case origin if origin in {list, tuple}:
                return [self.value(arguments[0], key) for _ in range(2)]
            case origin if origin is dict:
                is_free = arguments[1] is Any or key in PUBLIC.split()
                names = [self.text(key), "a"] if is_free and arguments[0] is not int else [1, 2]
                return {name: self.value(arguments[1], key) for name in names}
        if annotation is Any:
            secret = self.secret()
            return self._random.choice([secret, [secret, {"b": secret}], {"c-d": secret}])
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            fields = keys_of(annotation).items()
            return {name: self.value(field.annotation, f"{annotation.__name__}.{name}") for name, field in fields}
        if annotation is type(None):
            return None
        return self.text(key) if annotation is str else annotation(1)


def test_every_key_that_takes_texts_is_known_as_public_or_secret() -> None:
    reached = {section for root in ROOTS.values() for section in sections(root)}
    keys = {
        f"{section.__name__}.{name}"
        for section in reached
        for name, field in keys_of(section).items()
        if holds_texts(field.annotation)
    }

    assert not set(PUBLIC.split()) & set(SECRET.split())
    assert keys == {*PUBLIC.split(), *SECRET.split()}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("verb", sorted(ROOTS))
def test_no_secret_of_any_key_is_in_what_leaves_a_run(verb: str, seed: int, tmp_path: Any) -> None:
    planter = Planter(seed)
    tree = planter.value(ROOTS[verb], "")
    about = Exported("1" * 32, "tiny", 40)

    leaving = {
        "trackers": to_yaml(public_configuration(tree)),
        "report": repr(flat_public(tree)),
        "card": card_of(tree, verb, about, {}, {}).text({}, adapter=False),
        "exports and checkpoints": to_yaml(public_configuration(tree, WHOLE)),
        "settings that a resume compares": to_yaml(public_configuration(tree, HASHED)),
    }
    (tmp_path / "holdfast.yaml").write_text(to_yaml(tree))
    leaving["pushes"] = repr(outgoing_files(tmp_path)[0]["holdfast.yaml"])

    assert len(planter.secrets) > 30
    assert set(PLANTED.findall(json.dumps(tree))) == set(planter.secrets)
    assert {name: PLANTED.findall(text) for name, text in leaving.items()} == dict.fromkeys(leaving, [])


def flat(values: Any) -> dict[str, Any]:
    return dict(leaves(values, into_lists=True))


def policy(**changes: Any) -> dict[str, Any]:
    """Return the resolved tree of a policy's run that says much."""
    tree = {
        "run": {"name": "first"},
        "steps": 40,
        "model": {"path": "/models/Qwen3-0.6B", "config_override": {"rope_theta": 1e6}},
        "data": {"path": "../rows/held_out.jsonl", "template_kwargs": {"enable_thinking": False, "style": "short"}},
        "rollout": {"max_new_tokens": 16, "stop": ["\n\n"]},
        "reward": [
            {"kind": "path", "path": "/home/me/my.py:f", "kwargs": {"a": 1}},
            {"kind": "path", "path": "b.py:g", "kwargs": {}},
            {"kind": "judge", "url": "https://host:8000/v1?t=1", "api_key_variable": "JUDGE_KEY",
             "model": "big", "prompt": "Rate it.\n{completion}"},
        ],
        "evaluation": {"sets": {"held": {"path": "s3://me:word@bucket/rows.jsonl"}}},
        "optim": {"lr": 1e-6},
    }  # fmt: skip
    return as_plain(from_mapping(tree | changes, ROOTS["grpo"]))


def test_what_an_export_needs_is_in_its_configuration() -> None:
    tree = policy()

    whole = public_configuration(tree, WHOLE)

    differing = {
        "reward.0.kwargs": LEFT_OUT,
        "reward.2.url": "https://host:8000/v1",
        "evaluation.sets.held.path": "s3://bucket/rows.jsonl",
        "model.config_override": LEFT_OUT,
        "data.template_kwargs.style": LEFT_OUT,
    }
    before, after = flat(tree), flat(whole)
    assert {key: value for key, value in after.items() if before.get(key, ...) != value} == differing
    assert public_configuration(whole, WHOLE) == whole
    assert parse_text(to_yaml(whole), "x").values == whole


def test_useful_settings_are_public_under_short_names() -> None:
    public = flat(public_configuration(policy()))

    expected = {
        "run.name": "first", "steps": 40, "model.path": "Qwen3-0.6B", "data.path": "held_out.jsonl",
        "rollout.max_new_tokens": 16, "optim.kind": "adamw", "optim.lr": 1e-6, "reward.0.path": "my.py:f",
        "reward.2.url": "https://host:8000", "reward.2.api_key_variable": "JUDGE_KEY", "reward.2.model": "big",
        "evaluation.sets.held.path": "s3://bucket", "data.template_kwargs.enable_thinking": False,
        "checkpoint.keep.last": 3, "data.shuffle": True, "parallel.compile": "auto",
    }  # fmt: skip
    assert {key: public[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("AKIAIOSFODNN7EXAMPLE", LEFT_OUT),
        ("sk_live_1", LEFT_OUT),
        ("OPENAI_API_KEY", "OPENAI_API_KEY"),
    ],
)
def test_a_key_in_the_place_of_its_variable_is_left_out(text: str, whole: str) -> None:
    section = {"kind": "judge", "api_key_variable": text, "weight": "sk-1", "mode": "sk-2", "another": 3}

    public = public_configuration({"reward": [section]}, WHOLE)["reward"][0]

    left_out = dict.fromkeys(("weight", "mode", "another"), LEFT_OUT)
    assert public == {"kind": "judge", "api_key_variable": whole} | left_out


def test_equal_secrets_have_equal_hashes() -> None:
    trees = [policy(environment={"kind": "endpoint", "command": ["agent", "--api-key", key]}) for key in "aab"]

    first, again, other = (flat(public_configuration(tree, HASHED)) for tree in trees)

    assert first == again
    assert [key for key in first if first[key] != other[key]] == ["environment.command"]
    assert first["environment.command"].startswith("sha256 ")
