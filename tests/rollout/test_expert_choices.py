"""Completions that say which experts their tokens met: those of a forward pass over the whole sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.models.layers.routers import routers_of
from holdfast.models.names import named_parameters
from holdfast.rollout.engine import RolloutEngine, generate
from holdfast.rollout.local.generation import TransformersEngine
from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.rollout.sampling import Stops
from tests.rollout.test_inprocess import EOS, origin_of, reference, requests

KINDS = ("deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen3_moe")


def engine_of(model: Any, name: str, *, tells_experts: bool = True) -> RolloutEngine:
    place, stops = (torch.device("cpu"), torch.float64), Stops(frozenset({EOS, *range(60, 66)}))
    engine: RolloutEngine
    if name == "inprocess":
        engine = InProcessEngine(origin_of(model), *place, stops, rows=7, tells_experts=tells_experts)
    else:
        engine = TransformersEngine(origin_of(model), *place, stops, 0, rows=7, tells_experts=tells_experts)
    engine.update_weights(named_parameters(model).items(), 7)
    return engine


def chosen_in_one_pass(model: Any, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return [L, layers, k] experts by index + 1, of transformers' own forward of the whole sequence."""
    seen: list[torch.Tensor] = []
    hooks = [router.register_forward_hook(lambda _, __, out: seen.append(out[2])) for router, _ in routers_of(model)]
    with torch.no_grad():
        model(input_ids=torch.from_numpy(tokens)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).numpy() + 1


@pytest.mark.parametrize("name", ["inprocess", "transformers"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.cases(4)
def test_every_token_tells_the_experts_that_a_pass_over_the_whole_gives_it(kind: str, name: str) -> None:
    model, asked = reference(kind), requests(5)

    found = generate(engine_of(model, name), asked, SamplingConfig(max_new_tokens=12))

    lengths = {len(sampled.tokens) for sampled in found}
    assert len(found) == 20
    assert len(lengths) > 1, "some must end early, or no row is ever replaced"
    met = set()
    for sampled in found:
        tokens = np.concatenate([asked[sampled.request_id].prompt, sampled.tokens])
        expected = chosen_in_one_pass(model, tokens)
        told = sampled.expert_choices
        assert told is not None
        assert told.dtype == np.int16
        np.testing.assert_array_equal(np.sort(told[:-1], -1), np.sort(expected[:-1], -1))
        assert (told[-1] == 0).all(), "the last token was drawn and never read"
        met |= set(told.ravel().tolist())
    assert met == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("name", ["inprocess", "transformers"])
def test_telling_changes_no_completion(name: str) -> None:
    model, asked = reference("mixtral"), requests(5)

    telling, silent = (
        generate(engine_of(model, name, tells_experts=tells), asked, SamplingConfig(max_new_tokens=12))
        for tells in (True, False)
    )

    assert [one.tokens.tolist() for one in telling] == [one.tokens.tolist() for one in silent]
    assert [one.logprobs.tolist() for one in telling] == [one.logprobs.tolist() for one in silent]
    assert all(one.expert_choices is None for one in silent)


def test_rows_that_are_paused_and_prompts_in_pieces_tell_the_same_experts() -> None:
    model, asked, sampling = (
        reference("mixtral", max_position_embeddings=128),
        requests(5),
        SamplingConfig(max_new_tokens=40),
    )
    place, stops = (torch.device("cpu"), torch.float64), Stops(frozenset({EOS}))
    engine = InProcessEngine(origin_of(model), *place, stops, rows=16, blocks=8, piece=5, tells_experts=True)
    plain = InProcessEngine(origin_of(model), *place, stops, tells_experts=True)
    for each in (engine, plain):
        each.update_weights(named_parameters(model).items(), 7)
    engine.in_pieces = True

    found, expected = (generate(each, asked, sampling) for each in (engine, plain))

    assert sum(-(-(len(one.tokens)) // 16) for one in found) > 3 * 8, "rows must need more blocks than there are"
    for one, other in zip(found, expected, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.expert_choices is not None and other.expert_choices is not None
        np.testing.assert_array_equal(np.sort(one.expert_choices, -1), np.sort(other.expert_choices, -1))
