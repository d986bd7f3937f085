"""Rows that begin and end at any time, in blocks that they share and wait for, draw what each draws alone."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.models.names import named_parameters
from holdfast.rollout.engine import Request, Sampled, generate
from holdfast.rollout.local.blocks import RESERVED, Blocks
from holdfast.rollout.local.graphs import Recorder
from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.rollout.sampling import Stops, mixed
from holdfast.types import Finish
from tests.rollout.recorders import Steps
from tests.rollout.test_graphs import assert_same
from tests.rollout.test_inprocess import EOS, origin_of, reference

SEVERAL_ENDS = Stops(frozenset({EOS, *range(40, 48)}))
"""So many tokens that the lengths of completions differ widely."""
SINGLE = float(np.finfo(np.float32).eps)
"""Log-probabilities are computed in float64 and kept in float32, where the last bit may round otherwise."""


def engine_for(
    model: Any, stops: Stops = SEVERAL_ENDS, *, recorder: Recorder | None = None, **options: Any
) -> InProcessEngine:
    cpu = torch.device("cpu")
    engine = InProcessEngine(origin_of(model), cpu, torch.float64, stops, recorder=recorder, **options)
    engine.update_weights(named_parameters(model).items(), 7)
    engine.in_pieces = True
    return engine


def drawn_requests(count: int, *, longest: int, seed: int = 3) -> list[Request]:
    """Return requests whose prompts have 1 to `longest` tokens and 1 to 5 completions, `count` completions in all."""
    generator, found = np.random.default_rng(seed), list[Request]()
    while (left := count - sum(len(request.seeds) for request in found)) > 0:
        number, group = len(found), min(left, int(generator.integers(1, 6)))
        prompt = generator.integers(2, 90, int(generator.integers(1, longest + 1)))
        found.append(Request(number, prompt, tuple(mixed(5, number, place) for place in range(group))))
    return found


def one_at_a_time(model: Any, asked: list[Request], sampling: SamplingConfig) -> list[Sampled]:
    engine = engine_for(model, rows=1)
    return [sampled for request in asked for sampled in generate(engine, [request], sampling)]


ROUTED = 2e-6
"""Routers of DeepSeek's models are float32 products in a float64 model too, and round otherwise in another batch."""
_KINDS = ["qwen3", "gemma2", "mixtral", "gpt_oss", "deepseek_v3", "qwen2"]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_requests_of_drawn_lengths_give_together_what_each_gives_alone(kind: str, count: int) -> None:
    model, sampling = reference(kind, max_position_embeddings=128), SamplingConfig(max_new_tokens=30, temperature=1.2)
    asked = drawn_requests(count, longest=40)

    found = generate(engine_for(model, rows=24, blocks=48), asked, sampling)

    assert len({len(sampled.tokens) for sampled in found}) > 10, "completions are to end at many places"
    assert_same(found, one_at_a_time(model, asked, sampling), ROUTED if kind == "deepseek_v3" else SINGLE)


@pytest.mark.parametrize(("limit", "recorded"), [(12, False), (12, True), (7, False)])
def test_rows_wait_rather_than_take_more_blocks_than_there_are(limit: int, recorded: bool) -> None:
    model, sampling = reference("qwen3", max_position_embeddings=128), SamplingConfig(max_new_tokens=40)
    asked = drawn_requests(40, longest=40)  # of the longest, one completion needs six blocks and a copy
    stops = Stops(frozenset({EOS}))
    expected = generate(engine_for(model, stops), asked, sampling)
    engine = engine_for(model, stops, rows=16, blocks=limit, recorder=Steps() if recorded else None)
    engine.submit([], sampling)
    done, paused = [], 0

    with torch.no_grad(), engine.decoding(80) as decoding:
        decoding.submit(asked)
        while decoding.is_busy:
            done += [engine._sampled(row, finish) for row, finish in decoding.advance()]
            paused += sum(bool(waiting.rows[0].tokens) for waiting in decoding.waiting)
            assert decoding._blocks.used <= limit
            assert decoding.on_device.cache.capacity <= limit + RESERVED
            keys, _ = decoding.on_device.cache.pairs[0]
            assert len(keys) <= limit + RESERVED
        left = decoding._blocks.used

    assert paused > 0, "some row must give its blocks back, or nothing is seen here"
    assert left == 0, "all blocks come back"
    assert_same(sorted(done, key=lambda sampled: sampled[:2]), expected, SINGLE)


def test_a_prompt_that_waits_gives_its_blocks_to_the_last_row_that_is_decoded() -> None:
    model, sampling = reference("qwen3", max_position_embeddings=128), SamplingConfig(max_new_tokens=40)
    generator, stops = np.random.default_rng(0), Stops(frozenset())
    # The first row needs five blocks in the end. The second prompt has two, and its rows wait for room from the start.
    asked = [
        Request(0, generator.integers(2, 90, 26), (1,)),
        Request(1, generator.integers(2, 90, 32), tuple(range(5))),
    ]

    found = generate(engine_for(model, stops, blocks=6), asked, sampling)

    assert_same(found, generate(engine_for(model, stops), asked, sampling), SINGLE)


def test_blocks_that_are_given_out_again_bring_nothing_of_the_rows_before() -> None:
    model, sampling = reference("qwen3", max_position_embeddings=128), SamplingConfig(max_new_tokens=30)
    asked, engine = drawn_requests(40, longest=40), engine_for(model, rows=9)
    expected = generate(engine, asked, sampling)
    done = []

    with torch.no_grad(), engine.decoding(None) as decoding:
        decoding.submit(asked)
        while decoding.is_busy:
            done += [engine._sampled(row, finish) for row, finish in decoding.advance()]
            for pair in decoding.on_device.cache.pairs.values():
                for tensor in pair:
                    tensor[decoding._blocks._free] = float("nan")
        most = decoding._blocks.end - RESERVED

    assert most < 40, "completions must have blocks that others had before"
    assert_same(sorted(done, key=lambda sampled: sampled[:2]), expected, SINGLE)


def test_a_row_that_ends_makes_room_at_once() -> None:
    model, sampling = reference("qwen3", max_position_embeddings=128), SamplingConfig(max_new_tokens=30)
    engine = engine_for(model, rows=7)
    engine.submit([], sampling)

    with torch.no_grad(), engine.decoding(None) as decoding:
        decoding.submit(drawn_requests(60, longest=20))
        while decoding.is_busy:
            decoding.begin_rows()
            rows, waits = len(decoding.rows), bool(decoding.waiting)
            decoding.advance()

            assert rows == 7 or not waits


def test_rows_of_a_prompt_share_its_blocks_and_copy_the_last_one() -> None:
    model, sampling = reference("qwen3", max_position_embeddings=128), SamplingConfig(max_new_tokens=20)
    engine = engine_for(model, Stops(frozenset()))
    engine.submit([], sampling)
    prompt = np.random.default_rng(0).integers(2, 90, 40)  # two full blocks and a half

    with torch.no_grad(), engine.decoding(None) as decoding:
        decoding.submit([Request(0, prompt, tuple(range(8)))])
        decoding.begin_rows()
        tables = decoding.on_device.tables
        used = decoding._blocks.used

    assert {tuple(table[:2]) for table in tables} == {tuple(tables[0][:2])}
    assert len({table[2] for table in tables}) == 8
    assert used == 2 + 8


@pytest.mark.parametrize("recorded", [False, True])
def test_a_stop_token_ends_a_completion_wherever_it_comes(recorded: bool) -> None:
    model, sampling = reference("qwen3", max_position_embeddings=128), SamplingConfig(max_new_tokens=20)
    asked = drawn_requests(4, longest=20)
    free = generate(engine_for(model, Stops(frozenset())), asked, sampling)
    first = free[0].tokens.tolist()
    ends = set()

    for token in dict.fromkeys(first):
        stops = Stops(frozenset({token}))
        found = generate(engine_for(model, stops, recorder=Steps() if recorded else None), asked, sampling)
        for sampled, whole in zip(found, free, strict=True):
            tokens = whole.tokens.tolist()
            count = tokens.index(token) + 1 if token in tokens else 20
            assert sampled.tokens.tolist() == tokens[:count]
            assert sampled.finish is (Finish.STOP if token in tokens else Finish.LENGTH)
        ends.add(len(found[0].tokens))

    assert ends == {first.index(token) + 1 for token in first}


@pytest.mark.parametrize("recorded", [False, True])
def test_a_stop_text_ends_a_completion_wherever_it_comes(recorded: bool) -> None:
    model, tokenizer = reference("qwen3", max_position_embeddings=128), character_tokenizer()
    asked, most = drawn_requests(3, longest=20), 20
    stops = Stops(frozenset(), lambda tokens: tokenizer.decode(list(tokens)))
    free = generate(engine_for(model, stops), asked, SamplingConfig(max_new_tokens=most))
    text = tokenizer.decode(free[0].tokens.tolist())
    engine = engine_for(model, stops, recorder=Steps() if recorded else None)

    for offset in range(len(text) - 2):
        stop = text[offset : offset + 3]
        found = generate(engine, asked, SamplingConfig(max_new_tokens=most, stop=[stop]))
        for sampled, whole in zip(found, free, strict=True):
            tokens = whole.tokens.tolist()
            lengths = (n for n in range(1, most + 1) if stop in tokenizer.decode(tokens[:n]))
            assert sampled.tokens.tolist() == tokens[: next(lengths, most)]


def test_blocks_come_back_when_their_last_reader_is_gone() -> None:
    blocks = Blocks(16, limit=5)

    first = blocks.take(3)
    blocks.share(first[:2])
    blocks.give_back(first)

    assert blocks.used == 2
    assert blocks.has(3) and not blocks.has(4)
    assert set(blocks.take(3)).isdisjoint(first[:2])
    blocks.give_back(first[:2])
    assert blocks.used == 3
    assert blocks.end == RESERVED + 5


@pytest.mark.parametrize(
    ("prompts", "new_tokens", "rows", "most"),
    [
        ([(40, 8)], 20, 100, 3 + 8 * 2),  # 8 of 40 tokens lie in a block that each row copies, and 20 come behind them
        ([(40, 8)], 20, 3, 3 + 3 * 2),
        ([(32, 1), (1, 4)], 16, 100, 2 + 1 + 1 + 4 * 2),
        ([(1, 4), (32, 1)], 16, 2, 2 + 1 + 1 + 2),
    ],
)
def test_the_most_blocks_are_those_of_the_longest_rows(
    prompts: list[tuple[int, int]], new_tokens: int, rows: int, most: int
) -> None:
    assert Blocks(16).most(prompts, new_tokens, rows) == most


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt_oss", "deepseek_v3"])
def test_long_prompts_in_pieces_between_steps_give_what_whole_ones_give(kind: str) -> None:
    model, sampling = reference(kind, max_position_embeddings=128), SamplingConfig(max_new_tokens=12, temperature=1.2)
    asked = drawn_requests(24, longest=60)

    found = generate(engine_for(model, rows=6, piece=7), asked, sampling)

    assert_same(found, generate(engine_for(model, rows=6), asked, sampling), SINGLE)


def test_rows_are_decoded_between_the_pieces_of_a_long_prompt() -> None:
    model, sampling = reference("qwen3", max_position_embeddings=128), SamplingConfig(max_new_tokens=40)
    engine, generator = engine_for(model, Stops(frozenset()), rows=3, piece=8), np.random.default_rng(0)
    asked = [Request(number, generator.integers(2, 90, size), (7,)) for number, size in enumerate((70, 60, 3))]
    engine.submit([], sampling)
    seen = []

    with torch.no_grad(), engine.decoding(None) as decoding:
        decoding.submit(asked)
        while decoding.waiting:
            decoding.advance()
            read = decoding.waiting[0].read if decoding.waiting else -1
            seen.append((read, [len(row.tokens) for row in decoding.rows]))

    # A piece of eight tokens comes before each step; the first text has nine, and the second eight.
    assert seen[:3] == [(8, []), (16, []), (24, [])]
    assert (8, [3]) in seen
    assert seen[-1] == (-1, [10, 2, 2])


class _Forgets(torch.nn.Module):
    """A layer that adds what the first token of a pass is: something between passes that no cache has."""

    def __init__(self, embedding: torch.nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    @property
    def weight(self) -> Any:
        return self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embedding(tokens)
        return embedded + embedded[:, :1]


def keeps_something_between_passes(engine: InProcessEngine) -> None:
    """Plant what no cache has: every pass adds what its first token is."""
    inner = engine._replica.model.model
    inner.embed_tokens = _Forgets(inner.embed_tokens)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "mixtral", "deepseek_v3"])
def test_a_made_up_text_in_pieces_agrees_with_the_whole_and_draws_nothing(kind: str) -> None:
    engine = engine_for(reference(kind, max_position_embeddings=128), piece=24)
    draws = torch.get_rng_state()

    assert engine.why_whole() == ""
    assert torch.equal(torch.get_rng_state(), draws)


def test_a_model_that_keeps_something_between_passes_gives_something_else_in_pieces() -> None:
    engine = engine_for(reference("qwen3", max_position_embeddings=128), piece=24)

    keeps_something_between_passes(engine)

    assert re.fullmatch(r"what predicts the next token is \d\.\de[-+]\d\d of .* away", engine.why_whole())


def test_a_model_that_cannot_be_computed_in_pieces_says_why() -> None:
    engine = engine_for(reference("qwen3", max_position_embeddings=128), piece=24)

    def refuse(_: Any, tokens: tuple[torch.Tensor]) -> None:
        if tokens[0].shape[1] == 24:
            raise ValueError("a state is missing\nand a second line")

    engine._replica.model.model.embed_tokens.register_forward_pre_hook(refuse)

    assert engine.why_whole() == "ValueError: a state is missing"


@pytest.mark.parametrize("looked", [False, None])
def test_texts_are_computed_at_once_where_pieces_differ_or_nobody_looked(looked: bool | None) -> None:
    model, sampling = reference("qwen3", max_position_embeddings=128), SamplingConfig(max_new_tokens=1)
    asked = [Request(0, np.arange(2, 42), (1, 2))]
    engines = [engine_for(model, piece=piece) for piece in (8, 1024)]
    for engine in engines:
        keeps_something_between_passes(engine)
    engines[0].in_pieces = looked

    found, expected = (generate(engine, asked, sampling) for engine in engines)

    assert_same(found, expected, SINGLE)
