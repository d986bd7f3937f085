"""Completions of prompts with videos: their log-probabilities are those of transformers over the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.sections.data import DataConfig, PromptDataConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.data.batches.candidates import prompt_tokeniser
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.data.tokens.vision import ImageSide
from holdfast.models.files.vision import image_side, video_options
from holdfast.models.setup.model import Blueprint, blueprint
from holdfast.rollout.engine import Request, generate
from holdfast.rollout.sampling import mixed
from holdfast.types import Example
from tests.rollout.test_images import SAMPLING, engine_of, weights_of
from tests.videos import FPS, KINDS, upstream_inputs, video_directory, video_rows, video_tokenizer


@pytest.fixture(scope="module", params=KINDS)
def origin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Blueprint:
    place = video_directory(tmp_path_factory.mktemp(request.param), request.param)
    return blueprint(ModelConfig(path=str(place), dtype="float64"), Path(), seed=0)


def requests_of(origin: Blueprint, group: int = 3) -> list[Request]:
    """Return requests with a video, with nothing, with an image and a video, and the other way round."""
    data = PromptDataConfig(path="rows", max_length=160, video_fps=FPS)
    options = video_options(DataConfig(path="rows", video_fps=FPS), origin.directory)
    side = image_side(origin.image_processor, video_tokenizer(), origin.original_config, videos=options)
    assert isinstance(side, ImageSide)
    tokenise = prompt_tokeniser(RowTokeniser(video_tokenizer(), data, Path(), side), str, data, 500)
    found = []
    for number, row in enumerate(video_rows(4)):
        (prompt,) = tokenise({"prompt": row["messages"][:1]}, number, "rows", "row").examples
        seeds = tuple(mixed(11, number, place) for place in range(group))
        found.append(Request(number, prompt.tokens, seeds, prompt.model_inputs, prompt.positions))
    return found


def test_log_probabilities_are_those_of_a_forward_pass_over_the_whole(origin: Blueprint) -> None:
    model, asked = weights_of(origin), requests_of(origin)
    marks = (origin.family.image_token_id, origin.family.video_token_id)

    found = generate(engine_of(origin, model, "inprocess", 5), asked, SAMPLING)

    assert len(found) == 12
    assert max(len(sampled.tokens) for sampled in found) > 3
    for sampled in found:
        request = asked[sampled.request_id]
        tokens = np.concatenate([request.prompt, sampled.tokens])
        # A mark that the policy wrote itself ends its completion: nothing reads it, and a model would count it.
        shown = np.append(tokens[:-1], 0) if tokens[-1] in marks else tokens
        example = Example(0, 0, shown, np.zeros(shown.size, bool), model_inputs=request.model_inputs)
        with torch.no_grad():
            given: dict[str, Any] = upstream_inputs(origin.family.name, example)
            logits = model(input_ids=torch.tensor(shown)[None], use_cache=False, **given).logits[0, :-1].double()
        scored = (logits / SAMPLING.temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None]).squeeze(1)
        expected = scored[len(request.prompt) - 1 :].numpy()
        np.testing.assert_allclose(sampled.logprobs, expected, rtol=2e-5, atol=2e-5)


def test_frames_change_what_is_said(origin: Blueprint) -> None:
    model, (asked, *_) = weights_of(origin), requests_of(origin, group=8)
    inverted = {name: 1.0 - values if name == "pixel_values" else values for name, values in asked.model_inputs.items()}
    engine = engine_of(origin, model, "inprocess")

    one, other = (
        np.concatenate([sampled.logprobs[:1] for sampled in generate(engine, [each], SAMPLING)])
        for each in (asked, replace(asked, model_inputs=inverted))
    )

    assert np.abs(one - other).max() > 1e-3
