"""A turn goes on from the keys and values of the turns before it, and draws what it draws from its whole prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.models.layers.family import backbone_of
from holdfast.rollout.engine import Request, Sampled, converse, generate
from holdfast.rollout.local.blocks import RESERVED, Blocks, keys_of
from holdfast.rollout.local.cache import BLOCK_SIZE
from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.rollout.sampling import Stops, mixed
from tests.rollout.recorders import Program
from tests.rollout.test_continuous_batches import ROUTED, SINGLE, engine_for
from tests.rollout.test_graphs import assert_same
from tests.rollout.test_inprocess import EOS, reference

ENDS = Stops(frozenset({EOS, *range(40, 44)}))


class Conversations:
    """A source of several turns; behind each completion stand drawn tokens of an environment."""

    def __init__(self, count: int, turns: int, *, said: int = 21) -> None:
        self._turns, self._said = turns, said
        first = np.random.default_rng(1)
        self._waiting = []
        for number, size in enumerate(first.integers(3, 40, count)):
            seeds = (mixed(1, number), mixed(2, number))[: 1 + number % 2]
            self._waiting.append(Request(number, first.integers(2, 90, size), seeds))
        self._turn = dict.fromkeys(range(count), 1)
        self._asked: dict[int, Request] = {}
        self.sampled: list[Sampled] = []

    def ready(self, *, wait: bool) -> list[Request]:  # noqa: ARG002 - nothing outside is waited for
        waiting, self._waiting = self._waiting, []
        self._asked |= {request.request_id: request for request in waiting}
        return waiting

    def finished(self, sampled: Sequence[Sampled]) -> None:
        self.sampled += sampled
        for turn in sampled:
            before, number = self._asked[turn.request_id], 10 * turn.request_id + turn.place + 1000
            self._turn[number] = self._turn[turn.request_id] + 1
            said = np.random.default_rng(number).integers(2, 90, 1 + number % self._said)
            if self._turn[number] <= self._turns:
                prompt = np.concatenate([before.prompt, turn.tokens, said])
                self._waiting.append(Request(number, prompt, (mixed(3, number),)))

    @property
    def requests(self) -> list[Request]:
        return list(self._asked.values())


def turning(model: Any, stops: Stops, **options: Any) -> InProcessEngine:
    engine = engine_for(model, stops, **options)
    engine.turns = True
    return engine


def in_turns(engine: InProcessEngine, source: Conversations, sampling: SamplingConfig) -> list[Sampled]:
    converse(engine, source, sampling)
    return sorted(source.sampled, key=lambda sampled: (sampled.request_id, sampled.place))


def whole(model: Any, requests: Sequence[Request], sampling: SamplingConfig) -> list[Sampled]:
    found = generate(engine_for(model, ENDS), list(requests), sampling)
    return sorted(found, key=lambda sampled: (sampled.request_id, sampled.place))


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "mixtral", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("recorded", [False, True])
def test_turns_draw_what_their_whole_prompts_give(kind: str, *, recorded: bool) -> None:
    model, sampling = reference(kind, max_position_embeddings=512), SamplingConfig(max_new_tokens=20, temperature=1.2)
    engine = turning(model, ENDS, rows=8, blocks=200, recorder=Program() if recorded else None)
    engine.longest = 400

    source = Conversations(6, 4)
    found = in_turns(engine, source, sampling)

    assert len(found) > 20
    assert_same(found, whole(model, source.requests, sampling), ROUTED if kind == "deepseek_v3" else SINGLE)


@pytest.mark.parametrize("limit", [34, 60])
def test_where_blocks_are_few_what_is_remembered_makes_room(limit: int) -> None:
    model, sampling = reference("qwen3", max_position_embeddings=512), SamplingConfig(max_new_tokens=20)
    engine, source = turning(model, ENDS, rows=8, blocks=limit), Conversations(8, 4)

    found = in_turns(engine, source, sampling)

    assert_same(found, whole(model, source.requests, sampling), SINGLE)


def test_only_the_tokens_that_are_new_are_computed() -> None:
    model, sampling = reference("qwen3", max_position_embeddings=2048), SamplingConfig(max_new_tokens=16)
    computed = {}
    for looked in (True, False):
        engine, source = turning(model, Stops(frozenset()), rows=4, blocks=800), Conversations(1, 5)
        engine.turns, engine.longest = looked, 1000
        counts: list[int] = []
        hook = backbone_of(engine._replica.model).register_forward_pre_hook(
            lambda _, __, inputs, counts=counts: counts.append(inputs["input_ids"].numel()), with_kwargs=True
        )
        found = in_turns(engine, source, sampling)
        hook.remove()
        computed[looked] = sum(counts)
        drawn = sum(len(sampled.tokens) - 1 for sampled in found)
        prompts = [len(request.prompt) for request in source.requests]
        computed[looked] -= drawn

    # A turn computes what it is longer by than the turn before, its last token, and what fills no block.
    assert computed[False] == sum(prompts)
    turns = len(prompts)
    assert computed[True] <= max(prompts) - (turns - 1) * 15 + turns * BLOCK_SIZE
    assert computed[True] < 0.5 * computed[False]


class Sixteen:
    """One conversation of sixteen turns of 16 tokens, with 40 of an environment behind each."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self._waiting = [Request(0, np.random.default_rng(0).integers(2, 90, 36), (1,))]

    def ready(self, *, wait: bool) -> list[Request]:  # noqa: ARG002 - nothing outside is waited for
        waiting, self._waiting = self._waiting, []
        self.asked += waiting
        return waiting

    def finished(self, sampled: Sequence[Sampled]) -> None:
        (turn,), number = sampled or (None,), len(self.asked)
        if turn is not None and number < 16:
            said = np.random.default_rng(number).integers(2, 90, 40)
            self._waiting = [Request(number, np.concatenate([self.asked[-1].prompt, turn.tokens, said]), (number,))]


@pytest.mark.parametrize(("remembers", "computed"), [(False, 7296), (True, 752)])
def test_sixteen_turns_compute_as_many_tokens_as_is_written_down(*, remembers: bool, computed: int) -> None:
    model = reference("qwen3", max_position_embeddings=2048)
    engine, source, counts = turning(model, Stops(frozenset()), rows=4, blocks=800), Sixteen(), list[int]()
    engine.turns, engine.longest = remembers, 1000
    backbone_of(engine._replica.model).register_forward_pre_hook(
        lambda _, __, inputs: counts.append(inputs["input_ids"].numel()), with_kwargs=True
    )

    converse(engine, source, SamplingConfig(max_new_tokens=16))

    assert len(source.asked[-1].prompt) == 876
    assert sum(len(request.prompt) for request in source.asked) == 7296
    assert sum(counts) - 16 * 15 == computed  # a step of every token but the last of a turn


def test_weights_of_later_turns_are_never_those_of_an_earlier_conversation() -> None:
    model, other = (reference("qwen3", max_position_embeddings=512) for _ in range(2))
    with torch.no_grad():
        for value in other.parameters():
            value.mul_(1.5)
    sampling, engine = SamplingConfig(max_new_tokens=12), turning(model, ENDS, rows=8, blocks=200)
    in_turns(engine, Conversations(4, 3), sampling)

    engine.update_weights(((name, value) for name, value in other.named_parameters()), 8)
    source = Conversations(4, 3)
    found = in_turns(engine, source, sampling)

    assert_same(found, whole(other, source.requests, sampling), SINGLE)
    assert {sampled.weights_version for sampled in found} == {8}


def test_a_text_finds_the_blocks_that_it_begins_with_and_no_others() -> None:
    blocks, tokens = Blocks(4, limit=6), np.arange(18)
    table = blocks.take(5)
    blocks.remember(keys_of(tokens, 4), table)
    blocks.give_back(table)
    other = tokens.copy()
    other[5] = 99

    assert blocks.used == 0
    assert blocks.known(keys_of(tokens, 4)) == table[:4]  # the fifth is not full
    assert blocks.known(keys_of(other, 4)) == table[:1]
    assert blocks.known(keys_of(tokens[1:], 4)) == []

    blocks.share(blocks.known(keys_of(other, 4)))
    taken = blocks.take(3)  # the free one, the one that was never used, and the last one of the text

    assert table[0] not in taken
    assert sorted(taken) == sorted([table[4], RESERVED + 5, table[3]])
    assert blocks.known(keys_of(tokens, 4)) == table[:3]
    assert blocks.used == 4
    assert blocks.has(2) and not blocks.has(3)


def test_a_seeded_mutator_finds_no_block_that_two_texts_hold() -> None:
    generator, blocks = np.random.default_rng(5), Blocks(4, limit=40)
    held: list[tuple[np.ndarray[Any, Any], list[int]]] = []
    contents: dict[int, bytes] = {}
    for _ in range(3000):
        tokens = generator.integers(0, 2, int(generator.integers(1, 30)))
        keys = keys_of(tokens[:-1], 4)
        if generator.random() < 0.5 and blocks.has(blocks.needed(len(tokens))):
            known = blocks.known(keys)
            blocks.share(known)
            if blocks.has(blocks.needed(len(tokens)) - len(known)):
                assert [contents[block] for block in known] == keys[: len(known)]
                table = known + blocks.take(blocks.needed(len(tokens)) - len(known))
                contents |= dict(zip(table, keys, strict=False))
                contents |= dict.fromkeys(table[len(keys) :], b"")
                held.append((tokens, table))
            else:
                blocks.give_back(known)
        elif held:
            tokens, table = held.pop(int(generator.integers(len(held))))
            blocks.remember(keys_of(tokens[:-1], 4), table)
            blocks.give_back(table)
        assert blocks.used == len({block for _, table in held for block in table}) <= 40
        assert blocks.end <= RESERVED + 40
    for tokens, table in held:  # what is held was never overwritten
        keys = keys_of(tokens[:-1], 4)
        assert [contents[block] for block in table[: len(keys)]] == keys
