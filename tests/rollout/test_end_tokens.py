"""What ends a completion is what the model's own settings name, and nothing else of those settings is obeyed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.errors import ModelError
from holdfast.models.names import named_parameters
from holdfast.models.setup.model import Blueprint, blueprint
from holdfast.rollout.engine import Request, Sampled, generate
from holdfast.rollout.local.generation import TransformersEngine
from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.rollout.sampling import Stops, mixed
from holdfast.training.engines import stop_tokens
from holdfast.types import Finish
from tests.models.architectures import strong_model

CPU = torch.device("cpu")
ENGINES = ["inprocess", "transformers"]
BIASES = {"suppress_tokens": list(range(40, 90)), "no_repeat_ngram_size": 1, "temperature": 0.3, "min_new_tokens": 9}


def directory(path: Path, *, settings: Mapping[str, Any], keys: Mapping[str, Any] | None = None) -> Path:
    """Write a model whose tokenizer ends at 1, its config.json at 2, and its generation_config.json as `settings`."""
    strong_model("llama", vocab_size=len(character_tokenizer()), eos_token_id=2).double().save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps(settings))
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | dict(keys or {})))
    return path


def planned(path: Path) -> Blueprint:
    return blueprint(ModelConfig(path=str(path), dtype="float64"), Path(), seed=0)


def sampled(path: Path, kind: str, new_tokens: int = 24) -> list[Sampled]:
    origin, stops = planned(path), Stops(frozenset(stop_tokens(planned(path))))
    if kind == "inprocess":
        engine: Any = InProcessEngine(origin, CPU, torch.float64, stops)
    else:
        engine = TransformersEngine(origin, CPU, torch.float64, stops, 0)
    weights = strong_model("llama", vocab_size=len(character_tokenizer()), eos_token_id=2).double()
    engine.update_weights(named_parameters(weights).items(), 1)
    prompt = torch.arange(5, 12).numpy()
    request = Request(0, prompt, tuple(mixed(3, place) for place in range(16)))
    return generate(engine, [request], SamplingConfig(max_new_tokens=new_tokens))


@pytest.mark.parametrize("kind", ENGINES)
def test_a_completion_ends_at_every_token_that_the_generation_settings_name(tmp_path: Path, kind: str) -> None:
    path = directory(tmp_path, settings={"eos_token_id": [30, 31, 32, 33, 34, 35]})

    found = sampled(path, kind)

    assert stop_tokens(planned(path)) == [1, 30, 31, 32, 33, 34, 35]
    ended = [item for item in found if item.finish is Finish.STOP]
    assert {30, 31, 32, 33, 34, 35} & {int(item.tokens[-1]) for item in ended}
    for item in found:
        assert not {1, 30, 31, 32, 33, 34, 35} & set(item.tokens[:-1].tolist())
    assert any(2 in item.tokens[:-1] for item in sampled(path, kind, 64)), "what they do not name ends nothing"


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("where", ["generation_config.json", "config.json"])
def test_nothing_else_that_a_model_says_of_sampling_changes_a_draw(tmp_path: Path, kind: str, where: str) -> None:
    ends = {"eos_token_id": [30, 31]}
    plain = directory(tmp_path / "plain", settings=ends)
    biased = (
        directory(tmp_path / "biased", settings=ends, keys=BIASES)
        if where == "config.json"
        else directory(tmp_path / "biased", settings=ends | BIASES)
    )

    expected, found = sampled(plain, kind), sampled(biased, kind)

    assert [item.tokens.tolist() for item in found] == [item.tokens.tolist() for item in expected]
    assert [item.logprobs.tolist() for item in found] == [item.logprobs.tolist() for item in expected]


def test_a_model_in_memory_ends_where_its_own_settings_say() -> None:
    model = strong_model("llama", vocab_size=len(character_tokenizer()), eos_token_id=2)
    model.generation_config.eos_token_id = [30, 31]

    origin = blueprint(ModelConfig(path="given"), Path(), seed=0, live=model, tokenizer=character_tokenizer())

    assert stop_tokens(origin) == [1, 30, 31]


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "</s>"}'])
def test_settings_that_are_damaged_are_refused_by_their_file(tmp_path: Path, text: str) -> None:
    path = directory(tmp_path, settings={})
    (path / "generation_config.json").write_text(text)

    with pytest.raises(ModelError, match=r"generation_config\.json"):
        planned(path)
