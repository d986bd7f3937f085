"""Whether blocks are read in place follows from what a model's layers do with what the cache gives them.

The kernel's place is taken by torch's operations, row by row; tests/kernels has the kernel itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.rollout.engine import Request, Sampled, generate
from holdfast.rollout.local.block_attention import InPlace, Operands
from holdfast.rollout.local.cache import BLOCK_SIZE, BlockCache, View, cached_attention
from holdfast.rollout.local.inprocess import InProcessEngine
from tests.models.architectures import SETTINGS
from tests.rollout.recorders import Steps
from tests.rollout.test_continuous_batches import SINGLE, drawn_requests, engine_for
from tests.rollout.test_graphs import assert_same, recorded_engine
from tests.rollout.test_inprocess import engine_of, reference, requests

SAMPLING = SamplingConfig(max_new_tokens=12, temperature=1.3)
OTHERS = (
    "rollouts: attention gathers blocks from here on, since this model's layers do not attend to what the cache keeps, "
    "but to what they make of it"
)


def row_by_row(given: Operands) -> None:
    """Write what the kernel writes."""
    group = given.query.shape[1] // given.pair[0].shape[2]
    for row, last in enumerate(given.positions.tolist()):
        tokens = torch.arange(0 if given.window is None else max(0, last + 1 - given.window), last + 1)
        blocks = given.tables[row, tokens // BLOCK_SIZE]
        key, value = (stored[blocks, tokens % BLOCK_SIZE].repeat_interleave(group, 1) for stored in given.pair)
        scores = torch.einsum("hs,ths->ht", given.query[row], key) * given.scale
        if given.softcap is not None:
            scores = given.softcap * torch.tanh(scores / given.softcap)
        if given.sinks is not None:
            scores = torch.cat([scores, given.sinks[:, None].to(scores.dtype)], 1)
        weights = scores.softmax(1)[:, : len(tokens)]
        given.out[row] = torch.einsum("ht,thv->hv", weights, value)


class Counted(InPlace):
    """Tells how many rows each call of the stand-in had."""

    def __init__(self, *, scale: float = 1.0) -> None:
        self.rows: list[int] = []

        def run(given: Operands) -> None:
            self.rows.append(len(given.query))
            row_by_row(given)
            given.out.mul_(scale)

        super().__init__(run)


def found_by(engine: InProcessEngine, in_place: InPlace, asked: list[Request], how: SamplingConfig) -> list[Sampled]:
    engine.in_place = in_place
    return generate(engine, asked, how)


@pytest.mark.parametrize("kind", sorted(SETTINGS))
def test_every_architecture_draws_the_same_tokens_from_blocks_in_place(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, asked = reference(kind), requests(3)
    makes_others = kind in {"deepseek_v3", "minicpm3"}  # keys and values are made of a latent vector

    in_place = Counted()
    found = found_by(engine_of(model), in_place, asked, SAMPLING)

    assert in_place.agrees is not makes_others
    assert (len(in_place.rows) > 0) is not makes_others
    assert capsys.readouterr().out.splitlines() == [OTHERS] * makes_others
    assert_same(found, generate(engine_of(model), asked, SAMPLING), SINGLE)


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize("recorded", [False, True], ids=["operations", "fixed memory"])
def test_rows_that_wait_share_blocks_and_come_in_pieces_are_read_in_place(kind: str, *, recorded: bool) -> None:
    model, sampling = reference(kind, max_position_embeddings=128), SamplingConfig(max_new_tokens=30)
    asked = drawn_requests(30, longest=40)
    options: dict[str, Any] = {"rows": 12, "blocks": 30, "piece": 7}

    engine = engine_for(model, recorder=Steps() if recorded else None, **options)
    found = found_by(engine, Counted(), asked, sampling)

    assert_same(found, generate(engine_for(model, rows=12), asked, sampling), SINGLE)


def test_forms_are_compared_once_in_an_engine_and_for_few_rows() -> None:
    model, asked, in_place = reference("qwen3"), requests(3, 5), Counted()
    engine = engine_of(model)

    found_by(engine, in_place, asked, SAMPLING)
    once = len(in_place.rows)
    found_by(engine, in_place, asked, SAMPLING)

    assert in_place.rows[:3] == [8, 8, 15], "two layers of the comparison, and then all rows"
    assert len(in_place.rows) == 2 * once - 2


@pytest.mark.parametrize("recorded", [False, True], ids=["operations", "fixed memory"])
def test_the_step_that_is_compared_leaves_no_bit_behind(recorded: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model, asked = reference("qwen3"), requests(3, 5)
    sampling = SamplingConfig(max_new_tokens=12, repetition_penalty=1.5)
    engines = [recorded_engine(model, Steps(), rows=16) if recorded else engine_of(model) for _ in range(2)]
    in_place = Counted(scale=1.001)

    found = found_by(engines[0], in_place, asked, sampling)

    assert in_place.agrees is False
    assert "since the kernel that reads them in place differs by" in capsys.readouterr().out
    for one, other in zip(found, generate(engines[1], asked, sampling), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()


def test_an_engine_on_a_cpu_gathers() -> None:
    assert engine_of(reference("qwen3")).in_place is None


def test_a_step_in_place_makes_no_copy_of_blocks_and_no_mask_and_a_piece_of_one_token_does() -> None:
    in_place = Counted()
    in_place.agrees = True
    cache = BlockCache(in_place)
    cache.grow(4)
    tables, positions = torch.tensor([[2, 3]]), torch.tensor([[17]])
    new = torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8)
    masks = []
    for decodes in (True, False):
        cache.view = View.of(tables, positions, 18, decodes=decodes)

        given = cache.update(*new, 0)
        cached_attention(nn.Module(), torch.ones(1, 4, 1, 8), *given, None, rows=cache)

        assert [key.shape[2] for key in given] == [1 if decodes else 18] * 2
        masks.append(len(cache.view._masks))
    assert masks == [0, 1]
    assert in_place.rows == [1]
