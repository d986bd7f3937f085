"""Rows of models with recurrent layers are decoded side by side, each with its own states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.models.layers.attention import attention_layers
from holdfast.models.names import named_parameters
from holdfast.rollout.engine import Request, generate
from holdfast.rollout.local.generation import TransformersEngine
from holdfast.rollout.local.recurrent import why_not_decoded
from holdfast.rollout.sampling import Stops
from tests.models.architectures import settings_of
from tests.rollout.recorders import Program, Steps
from tests.rollout.test_continuous_batches import drawn_requests, engine_for, one_at_a_time
from tests.rollout.test_graphs import assert_same, by_recordings
from tests.rollout.test_inprocess import EOS, engine_of, origin_of, own_logprobs, reference, requests
from tests.versions import skip_with

SAMPLING = SamplingConfig(max_new_tokens=20, temperature=1.2)
DECODED = ["qwen3_next", "lfm2", "falcon_h1"]
SINGLE = 1e-5
"""How far log-probabilities may lie apart: states and decays are float32 in these models whatever their dtype is."""


def hybrid(kind: str) -> Any:
    return reference(kind, max_position_embeddings=128)


@pytest.mark.parametrize("kind", DECODED)
def test_log_probabilities_are_those_of_a_forward_pass_over_the_whole(kind: str) -> None:
    model, asked = hybrid(kind), requests()

    found = generate(engine_of(model), asked, SAMPLING)

    assert len(found) == 12
    for sampled in found:
        expected = own_logprobs(model, asked[sampled.request_id].prompt, sampled, SAMPLING.temperature)
        np.testing.assert_allclose(sampled.logprobs, expected, rtol=SINGLE, atol=SINGLE)


@pytest.mark.parametrize("kind", DECODED)
@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_requests_of_drawn_lengths_give_together_what_each_gives_alone(kind: str, count: int) -> None:
    model, asked = hybrid(kind), drawn_requests(count, longest=40)

    # Blocks run out, so that rows are paused and begin again from their prompt and what they have drawn.
    found = generate(engine_for(model, rows=24, blocks=20), asked, SAMPLING)

    assert len({len(sampled.tokens) for sampled in found}) > 10, "completions are to end at many places"
    assert_same(found, one_at_a_time(model, asked, SAMPLING), SINGLE)


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2"])
def test_completions_are_those_of_transformers_own_generation(kind: str) -> None:
    model, asked = hybrid(kind), requests(4)
    cpu, stops = torch.device("cpu"), Stops(frozenset({EOS}))
    engine = TransformersEngine(origin_of(model), cpu, torch.float64, stops, 0)
    engine.update_weights(named_parameters(model).items(), 7)

    assert_same(generate(engine_of(model), asked, SAMPLING), generate(engine, asked, SAMPLING), SINGLE)


@pytest.mark.parametrize("kind", DECODED)
@pytest.mark.cases(2)
def test_a_recorded_step_changes_states_where_they_lie(kind: str) -> None:
    model, asked = hybrid(kind), requests(3)
    expected = generate(engine_of(model), asked, SAMPLING)

    assert_same(by_recordings(model, Steps(), asked, SAMPLING), expected, SINGLE)


def test_a_step_with_states_is_a_program_of_its_memory_alone() -> None:
    model, asked, recorder = hybrid("lfm2"), requests(3), Program()

    assert_same(
        by_recordings(model, recorder, asked, SAMPLING, rows=512), generate(engine_of(model), asked, SAMPLING), SINGLE
    )
    assert recorder.calls == len(recorder.buckets) > 0


def test_no_more_rows_are_decoded_than_there_is_memory_for_beside_their_states() -> None:
    model, asked = hybrid("qwen3_next"), drawn_requests(30, longest=20)
    engine = engine_for(model, rows=16, blocks=60)
    engine.submit([], SAMPLING)

    with torch.no_grad(), engine.decoding(None) as decoding:
        decoding.submit(asked)
        most = 0
        while decoding.is_busy:
            decoding.advance()
            most = max(most, len(decoding.rows))
        cache = decoding.on_device.cache
        block = sum(tensor[0].nbytes for pair in cache.pairs.values() for tensor in pair)
        states = sum(state.nbytes for state in decoding.on_device._kept.slots.state.layers.values())  # type: ignore[union-attr]

    assert 1 <= most < 16
    assert states <= 60 * block, "slots take no more than blocks may"
    assert engine._state_blocks


MAMBA = pytest.param("mamba", marks=skip_with("transformers>=5.24", "Mamba takes a cache by the name of the others"))


@pytest.mark.parametrize("kind", [*DECODED, "recurrent_gemma", MAMBA])
def test_a_small_model_tells_which_architectures_are_decoded_so(kind: str) -> None:
    why = why_not_decoded(origin_of(hybrid(kind)))

    if kind in DECODED:
        assert why == ""
    else:
        assert why.startswith("our own decoding would give it log-probabilities that are ")


def test_longer_prompts_that_come_later_wait_for_room_beside_the_states_of_rows() -> None:
    model, generator = hybrid("qwen3_next"), np.random.default_rng(0)
    sizes = [4] * 16 + [100] * 3
    asked = [Request(number, generator.integers(2, 90, size), (number,)) for number, size in enumerate(sizes)]
    engine = engine_for(model, rows=16, blocks=90)
    engine.submit([], SAMPLING)
    done = []

    with torch.no_grad(), engine.decoding(None) as decoding:
        decoding.submit(asked[:16])
        done += decoding.advance()
        begun, room = len(decoding.rows), decoding._most_rows
        decoding.submit(asked[16:])
        assert decoding._most_rows < begun <= room, "more rows are decoded than may begin now"
        while decoding.is_busy:
            done += decoding.advance()

    found = sorted((engine._sampled(row, finish) for row, finish in done), key=lambda sampled: sampled[:2])
    assert_same(found, one_at_a_time(model, asked, SAMPLING), SINGLE)


@pytest.mark.parametrize("kind", ["granitemoehybrid", "bamba", "qwen3_next", "lfm2"])
def test_attention_layers_are_counted_among_recurrent_ones(kind: str) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97}
    mixer = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "intermediate_size": 64}
    kinds = {
        "granitemoehybrid": {**mixer, "layer_types": ["mamba", "attention", "mamba", "mamba"]},
        "bamba": {**mixer, "attn_layer_indices": [1]},
        "qwen3_next": settings_of("qwen3_next") | {"layer_types": ["linear_attention", "full_attention"] * 2},
        "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    }
    config = AutoConfig.for_model(kind, **(sizes | {"num_hidden_layers": 4} | kinds[kind]))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    assert attention_layers(model) == (2 if kind == "qwen3_next" else 1)
