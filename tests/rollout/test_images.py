"""Completions of prompts with pictures: their log-probabilities are those of a forward pass over the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.sections.data import PromptDataConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.data.batches.candidates import prompt_tokeniser
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.data.tokens.vision import ImageSide
from holdfast.models.files.vision import image_side
from holdfast.models.names import named_parameters
from holdfast.models.setup.model import Blueprint, blueprint
from holdfast.rollout.engine import Request, RolloutEngine, Sampled, generate
from holdfast.rollout.local.generation import TransformersEngine
from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.rollout.sampling import Stops, mixed
from tests.rollout.recorders import Program
from tests.vision import KINDS, picture_rows, tokenizer_of, vision_directory

CPU = torch.device("cpu")
PACKED = [kind for kind in KINDS if kind != "gemma3"]
SAMPLING = SamplingConfig(max_new_tokens=9, temperature=1.3)


@pytest.fixture(scope="module", params=KINDS)
def origin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Blueprint:
    place = vision_directory(tmp_path_factory.mktemp(request.param), request.param)
    return blueprint(ModelConfig(path=str(place), dtype="float64"), Path(), seed=0)


def weights_of(origin: Blueprint) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(origin.directory, dtype=torch.float64).eval()


def side_of(origin: Blueprint) -> ImageSide:
    side = image_side(origin.image_processor, tokenizer_of(origin.family.name), origin.original_config)
    assert isinstance(side, ImageSide)
    return side


def requests_of(origin: Blueprint, group: int = 3) -> list[Request]:
    """Return requests with 1, 0 and 2 pictures."""
    rows = RowTokeniser(origin.tokenizer, PromptDataConfig(path="rows"), Path(), side_of(origin))
    tokenise = prompt_tokeniser(rows, origin.tokenizer.decode, PromptDataConfig(path="rows"), 500)
    found = []
    for number, row in enumerate(picture_rows(4)):
        (prompt,) = tokenise({"prompt": row["messages"][:1]}, number, "rows", "row").examples
        seeds = tuple(mixed(11, number, place) for place in range(group))
        found.append(Request(number, prompt.tokens, seeds, prompt.model_inputs, prompt.positions))
    return found


def stops_of(origin: Blueprint) -> Stops:
    marks = (origin.family.image_token_id, origin.family.video_token_id)
    return Stops(frozenset({1, *(token for token in marks if token is not None)}))


def engine_of(origin: Blueprint, model: Any, kind: str, rows: int = 512) -> RolloutEngine:
    engine: RolloutEngine
    if kind in {"inprocess", "recorded"}:
        recorder = Program() if kind == "recorded" else None
        engine = InProcessEngine(origin, CPU, torch.float64, stops_of(origin), rows=rows, recorder=recorder)
    else:
        engine = TransformersEngine(origin, CPU, torch.float64, stops_of(origin), 0, rows=rows)
    engine.update_weights(named_parameters(model).items(), 7)
    return engine


def own_logprobs(origin: Blueprint, model: Any, request: Request, sampled: Sampled) -> Any:
    """Score a completion by transformers' own forward of the whole sequence."""
    tokens = np.concatenate([request.prompt, sampled.tokens])
    # A last image token is no image's; nothing reads it, and a model counts.
    shown = np.append(tokens[:-1], 0) if tokens[-1] == origin.family.image_token_id else tokens
    inputs = side_of(origin).upstream_inputs(shown, request.model_inputs) if request.model_inputs else {}
    if not request.model_inputs and origin.family.name == "gemma3":
        inputs = {"token_type_ids": np.zeros((1, shown.size), np.int64)}
    given = {name: torch.as_tensor(values) for name, values in inputs.items()}
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(shown)[None], use_cache=False, **given).logits[0, :-1].double()
    scored = (logits / SAMPLING.temperature).log_softmax(-1)
    return scored.gather(1, torch.tensor(tokens)[1:, None]).squeeze(1)[len(request.prompt) - 1 :].numpy()


@pytest.mark.parametrize("kind", ["inprocess", "transformers"])
def test_log_probabilities_are_those_of_a_forward_pass_over_the_whole(origin: Blueprint, kind: str) -> None:
    if kind == "inprocess" and origin.family.name == "gemma3":
        pytest.skip("its images want one sequence per row")
    model, asked = weights_of(origin), requests_of(origin)

    found = generate(engine_of(origin, model, kind), asked, SAMPLING)

    assert len(found) == 12
    assert max(len(sampled.tokens) for sampled in found) > 3
    for sampled in found:
        expected = own_logprobs(origin, model, asked[sampled.request_id], sampled)
        np.testing.assert_allclose(sampled.logprobs, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.cases(3)
def test_engines_give_the_same_completions_and_those_of_few_rows_and_of_recorded_steps_too(
    origin: Blueprint, capsys: pytest.CaptureFixture[str]
) -> None:
    if origin.family.name == "gemma3":
        pytest.skip("its images want one sequence per row")
    model, asked = weights_of(origin), requests_of(origin)

    first, *others = (
        [(sampled.request_id, sampled.place, sampled.tokens.tolist(), sampled.finish) for sampled in found]
        for found in (
            generate(engine_of(origin, model, kind, rows), asked, SAMPLING)
            for kind, rows in (
                ("inprocess", 512),
                ("inprocess", 4),
                ("transformers", 512),
                ("transformers", 5),
                ("recorded", 512),
            )
        )
    )

    assert others == [first] * 4
    assert "without graphs" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["inprocess", "transformers"])
def test_pictures_change_what_is_said(origin: Blueprint, kind: str) -> None:
    if kind == "inprocess" and origin.family.name == "gemma3":
        pytest.skip("its images want one sequence per row")
    model, (asked, *_) = weights_of(origin), requests_of(origin, group=8)
    inverted = {name: 1.0 - values if name == "pixel_values" else values for name, values in asked.model_inputs.items()}

    one, other = (
        np.concatenate([sampled.logprobs[:1] for sampled in generate(engine_of(origin, model, kind), [each], SAMPLING)])
        for each in (asked, replace(asked, model_inputs=inverted))
    )

    assert np.abs(one - other).max() > 1e-3
