"""Tokens sampled in this process: their log-probabilities are the model's own, their draws depend on seeds alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.models.names import named_parameters
from holdfast.models.setup.model import Blueprint, blueprint
from holdfast.rollout.engine import Request, Sampled, converse, generate
from holdfast.rollout.local.generation import TransformersEngine
from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.rollout.sampling import Stops, mixed, uniform
from holdfast.types import Finish
from tests.memory import most_allocated
from tests.models.architectures import SETTINGS, strong_model

EOS = 1


def origin_of(model: Any) -> Blueprint:
    section = ModelConfig(path="given", tokenizer="builtin:characters")
    return blueprint(section, Path(), seed=0, live=model, tokenizer=character_tokenizer())


def engine_of(model: Any, *, rows: int = 512, dtype: torch.dtype = torch.float64) -> InProcessEngine:
    engine = InProcessEngine(origin_of(model), torch.device("cpu"), dtype, Stops(frozenset({EOS})), rows=rows)
    engine.update_weights(named_parameters(model).items(), 7)
    return engine


def requests(count: int = 3, group: int = 4, *, shortest: int = 3) -> list[Request]:
    generator = np.random.default_rng(5)
    return [
        Request(
            number,
            generator.integers(2, 90, shortest + 3 * number),
            tuple(mixed(11, number, place) for place in range(group)),
        )
        for number in range(count)
    ]


def own_logprobs(
    model: Any, prompt: np.ndarray[Any, Any], sampled: Sampled, temperature: float
) -> np.ndarray[Any, Any]:
    """Score a completion by transformers' own forward of the whole sequence."""
    tokens = torch.tensor(np.concatenate([prompt, sampled.tokens]))[None]
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].double() / temperature
    scored = logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1)
    return scored[len(prompt) - 1 :].numpy()


def reference(kind: str, **settings: Any) -> Any:
    model = strong_model(kind, **settings).double()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("kind", sorted(SETTINGS))
def test_log_probabilities_are_those_of_a_forward_pass_over_the_whole(kind: str) -> None:
    model = reference(kind)
    asked = requests()

    found = generate(engine_of(model), asked, SamplingConfig(max_new_tokens=11, temperature=1.3))

    assert len(found) == 12
    for sampled in found:
        expected = own_logprobs(model, asked[sampled.request_id].prompt, sampled, 1.3)
        np.testing.assert_allclose(sampled.logprobs, expected, rtol=1e-5, atol=1e-5)
        assert sampled.weights_version == 7


def test_a_token_is_where_its_uniform_number_falls_in_the_models_distribution() -> None:
    model, asked = reference("qwen2"), requests()

    found = generate(engine_of(model), asked, SamplingConfig(max_new_tokens=10))

    for sampled in found:
        request = asked[sampled.request_id]
        tokens = torch.tensor(np.concatenate([request.prompt, sampled.tokens]))[None]
        with torch.no_grad():
            ends = model(input_ids=tokens).logits[0, len(request.prompt) - 1 : -1].softmax(-1).cumsum(-1)
        seed = torch.tensor([request.seeds[sampled.place]] * len(sampled.tokens))
        numbers = uniform(seed, torch.arange(len(sampled.tokens)))
        assert sampled.tokens.tolist() == [
            int(torch.searchsorted(row, number, right=True)) for row, number in zip(ends, numbers, strict=True)
        ]


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_a_request_gives_the_same_tokens_in_any_batch(rows: int) -> None:
    model, asked = reference("qwen3"), requests(5)
    sampling = SamplingConfig(max_new_tokens=24)

    together = generate(engine_of(model), asked, sampling)
    apart = generate(engine_of(model, rows=rows), asked[::-1], sampling)

    assert {len(sampled.tokens) for sampled in together} != {24}, "some must end early, or no row is ever replaced"
    for one, other in zip(together, apart, strict=True):
        assert (one.request_id, one.place, one.finish) == (other.request_id, other.place, other.finish)
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5)


def test_rows_that_ended_stay_within_the_positions_that_a_model_has() -> None:
    asked, sampling = requests(5), SamplingConfig(max_new_tokens=21)
    model = reference("gpt2", max_position_embeddings=max(len(each.prompt) for each in asked) + 21)

    apart = generate(engine_of(model, rows=5), asked, sampling)

    together = generate(engine_of(model), asked, sampling)
    assert [one.tokens.tolist() for one in apart] == [other.tokens.tolist() for other in together]
    assert len({len(one.tokens) for one in apart}) > 2, "some must end early, or no row goes on beside a younger one"


def test_the_same_rollout_is_bit_identical_when_repeated() -> None:
    model, asked = reference("qwen3").float(), requests(5)
    engine = engine_of(model, rows=7, dtype=torch.float32)

    first, second = (generate(engine, asked, SamplingConfig(max_new_tokens=24)) for _ in range(2))

    for one, other in zip(first, second, strict=True):
        assert one.tokens.tobytes() == other.tokens.tobytes()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


def test_greedy_equals_transformers_generate() -> None:
    model, asked = reference("llama"), requests()

    found = generate(engine_of(model), asked, SamplingConfig(max_new_tokens=16, temperature=0))

    for sampled in found:
        prompt = torch.tensor(asked[sampled.request_id].prompt)[None]
        expected = model.generate(input_ids=prompt, do_sample=False, max_new_tokens=16, eos_token_id=EOS)
        assert sampled.tokens.tolist() == expected[0, prompt.shape[1] :].tolist()


def test_the_stop_token_belongs_to_the_completion_and_ends_it() -> None:
    found = generate(engine_of(reference("qwen3")), requests(5), SamplingConfig(max_new_tokens=24))

    finishes = {sampled.finish for sampled in found}
    assert finishes == {Finish.STOP, Finish.LENGTH}
    for sampled in found:
        ended = sampled.finish is Finish.STOP
        assert (EOS in sampled.tokens.tolist()) is ended
        assert ended or len(sampled.tokens) == 24
        assert not ended or sampled.tokens.tolist().index(EOS) == len(sampled.tokens) - 1


def test_a_stop_text_ends_a_completion_at_the_token_that_completes_it() -> None:
    model, asked = reference("qwen3"), requests(5)
    tokenizer = character_tokenizer()
    stops = Stops(frozenset({EOS}), lambda tokens: tokenizer.decode(list(tokens)))
    free = generate(engine_of(model), asked, SamplingConfig(max_new_tokens=24))
    texts = [tokenizer.decode(sampled.tokens.tolist()) for sampled in free]
    stop = next(text[3:5] for text in texts if len(text) > 6)
    engine = InProcessEngine(origin_of(model), torch.device("cpu"), torch.float64, stops)
    engine.update_weights(named_parameters(model).items(), 0)

    found = generate(engine, asked, SamplingConfig(max_new_tokens=24, stop=[stop]))

    for sampled, whole in zip(found, free, strict=True):
        count = next(
            (
                length
                for length in range(1, len(whole.tokens) + 1)
                if stop in tokenizer.decode(whole.tokens[:length].tolist())
            ),
            len(whole.tokens),
        )
        assert sampled.tokens.tolist() == whole.tokens[:count].tolist()


def test_new_weights_leave_nothing_of_the_old_ones() -> None:
    old, new = reference("qwen3"), reference("qwen3")
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    asked, sampling = requests(), SamplingConfig(max_new_tokens=8)
    engine = engine_of(old)
    generate(engine, asked, sampling)
    engine.sleep()

    engine.update_weights(named_parameters(new).items(), 8)
    found = generate(engine, asked, sampling)

    for sampled in found:
        expected = own_logprobs(new, asked[sampled.request_id].prompt, sampled, 1.0)
        np.testing.assert_allclose(sampled.logprobs, expected, rtol=1e-5, atol=1e-5)
        assert sampled.weights_version == 8


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # of torch 2.11
@pytest.mark.parametrize("tied", [False, True])
def test_the_first_weights_take_no_more_memory_than_they_are(tied: bool) -> None:
    model = strong_model("qwen3", intermediate_size=2048, num_hidden_layers=4, tie_word_embeddings=tied)
    names = {name: parameter.shape for name, parameter in named_parameters(model).items()}
    engine = InProcessEngine(origin_of(model), torch.device("cpu"), torch.bfloat16, Stops(frozenset({EOS})))
    whole = 2 * sum(shape.numel() for shape in names.values())
    largest = 4 * max(shape.numel() for shape in names.values())

    def arrive() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in names.items():
            yield name, torch.full(shape, 0.5)

    most = most_allocated(lambda: engine.update_weights(arrive(), 1))

    assert 10 * largest < 2 * whole
    assert whole <= most < whole + 2 * largest + 100_000, "one float32 tensor is read while the next one is made"
    shared = engine._replica.model.lm_head.weight is engine._replica.model.get_input_embeddings().weight
    assert shared is tied


def test_weights_of_the_right_dtype_are_shared_and_not_copied() -> None:
    model = reference("qwen3")
    engine = engine_of(model)
    own = {parameter.data_ptr() for parameter in model.parameters()}

    before = {parameter.data_ptr() for parameter in engine._replica.model.parameters()}
    generate(engine, requests(), SamplingConfig(max_new_tokens=2))
    after = {parameter.data_ptr() for parameter in engine._replica.model.parameters()}

    assert before == own
    assert after == own, "a layout for decoding is left behind"


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0}, {"top_k": 5, "repetition_penalty": 1.7}, {"top_p": 0.6, "min_p": 0.1}]
)
def test_transformers_own_loop_gives_the_same_completions(sampling: dict[str, float]) -> None:
    model, asked = reference("qwen3"), requests(5)
    options = SamplingConfig(max_new_tokens=24, **sampling)
    other = TransformersEngine(origin_of(model), torch.device("cpu"), torch.float64, Stops(frozenset({EOS})), 0, rows=6)
    other.update_weights(named_parameters(model).items(), 7)

    found = generate(engine_of(model), asked, options)
    expected = generate(other, asked, options)

    assert sampling or {sampled.finish for sampled in found} == {Finish.STOP, Finish.LENGTH}
    for one, another in zip(found, expected, strict=True):
        assert (one.request_id, one.place, one.finish) == (another.request_id, another.place, another.finish)
        assert one.tokens.tolist() == another.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, another.logprobs, rtol=1e-4, atol=1e-6)


def test_an_interrupted_rollout_returns_at_once_and_says_so() -> None:
    asked = requests(5)
    calls = iter([False, False, True, *[True] * 50])
    engine = engine_of(reference("qwen3"), rows=8)

    engine.submit(asked, SamplingConfig(max_new_tokens=24))
    found = engine.collect(lambda: next(calls))

    assert len(found) == 20
    assert {sampled.finish for sampled in found} <= {Finish.STOP, Finish.ABORT}
    assert max(len(sampled.tokens) for sampled in found) <= 3


class TwoTurns:
    """A source whose completions are continued once, each behind a token of its own."""

    def __init__(self, first: list[Request]) -> None:
        self.waiting, self.started, self.turns = list(first), dict[int, Request](), list[Sampled]()

    def ready(self, *, wait: bool) -> list[Request]:  # noqa: ARG002 - nothing outside is waited for
        waiting, self.waiting = self.waiting, []
        self.started |= {request.request_id: request for request in waiting}
        return waiting

    def finished(self, sampled: Sequence[Sampled]) -> None:
        self.turns += sampled
        for turn in sampled:
            if turn.request_id < 100:
                prompt = np.concatenate([self.started[turn.request_id].prompt, turn.tokens, [5 + turn.place]])
                number = 100 + 10 * turn.request_id + turn.place
                self.waiting.append(Request(number, prompt, (mixed(3, number),)))


def test_turns_that_join_while_others_are_decoded_are_those_of_rounds() -> None:
    model, sampling = reference("llama"), SamplingConfig(max_new_tokens=9)
    joined, rounds = TwoTurns(requests()), TwoTurns(requests())

    converse(engine_of(model), joined, sampling)
    while asked := rounds.ready(wait=True):
        rounds.finished(generate(engine_of(model), asked, sampling))

    assert len(joined.turns) == len(rounds.turns) == 24
    for turn, expected in zip(
        *(sorted(source.turns, key=lambda item: item[:2]) for source in (joined, rounds)), strict=True
    ):
        assert turn.tokens.tolist() == expected.tokens.tolist()
        assert np.allclose(turn.logprobs, expected.logprobs, rtol=0, atol=1e-6)
