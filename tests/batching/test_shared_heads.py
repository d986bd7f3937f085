"""Sequences that begin alike are laid down with their beginning once: nothing else about them changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from holdfast.data.batches.assembly import plan_units, saves_work, taken_apart
from holdfast.data.batches.packing import CommonStart, Share, pack, unpack
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.heads.spans import predictors
from holdfast.models.layers.attention import PACKED, packed_attention, register_attention
from holdfast.models.layers.document_attention import Documents
from holdfast.models.layers.family import family_of
from holdfast.models.layers.routers import RouterLoss
from holdfast.models.layers.shared_keys import key_places
from holdfast.objectives.supervised import NegativeLogLikelihood
from holdfast.types import Batch, Example, LossSum
from tests.models.architectures import SETTINGS, strong_model, twin


def group(sizes: list[int], head: int, first_id: int = 0, seed: int = 0) -> list[Example]:
    """Return sequences with a common head, and parts of their own of these sizes."""
    generator = np.random.default_rng([seed, first_id])
    begin = generator.integers(2, 90, head)
    found = []
    for number, size in enumerate(sizes):
        tokens = np.concatenate([begin, generator.integers(2, 90, size)])
        carried = {"advantages": generator.normal(size=head + size).astype(np.float32)}
        carried["advantages"][:head] = 0
        found.append(
            Example(first_id + number, first_id, tokens, np.arange(head + size) >= head, "s", per_token=carried)
        )
    return found


GROUPS = [group([5, 3, 5], 6), group([4], 3, 10), group([1, 7], 1, 20)]
HEADS = [CommonStart(3, 6), CommonStart(1, 3), CommonStart(2, 1)]
FLAT = [example for members in GROUPS for example in members]
SHARES = [Share(0.5 + number / 7, 1.0) for number in range(len(FLAT))]


def shared(dtype: torch.dtype = torch.float64) -> Batch:
    return pack(FLAT, SHARES, dtype=dtype, heads=HEADS)


def test_a_head_is_laid_down_once_and_positions_go_on_behind_it() -> None:
    batch = shared()

    assert batch.tokens.shape == (1, 6 + 13 + 7 + 1 + 8)
    assert batch.lengths == ((19, 7, 9),)
    assert batch.branches == ((5, 3, 5), (), (1, 7))
    assert batch.position_ids[0, 0, :19].tolist() == [*range(6), *range(6, 11), *range(6, 9), *range(6, 11)]
    assert batch.predictor_index[0, [6, 7, 11, 14]].tolist() == [5, 6, 5, 5]


def test_taking_apart_gives_back_what_was_laid_down() -> None:
    for found, example in zip(unpack(shared()), FLAT, strict=True):
        assert (found.sample_id, found.prompt_id, found.source) == (example.sample_id, example.prompt_id, "s")
        assert found.tokens.tolist() == example.tokens.tolist()
        assert found.loss_mask.tolist() == example.loss_mask.tolist()
        assert found.per_token["advantages"].tobytes() == example.per_token["advantages"].tobytes()


def test_sequences_that_do_not_begin_alike_are_refused() -> None:
    with pytest.raises(ValueError, match="sample 10 does not begin like sample 0"):
        pack([FLAT[0], FLAT[3]], SHARES[:2], heads=[CommonStart(2, 3)])


def test_a_head_with_a_trained_token_is_refused() -> None:
    first, second = group([4, 4], 3)
    tokens = second.tokens.copy()
    tokens[3] = first.tokens[3]
    alike = [first, Example(1, 0, tokens, second.loss_mask, "s", per_token=second.per_token)]

    with pytest.raises(ValueError, match="sample 0: a token of the shared head would be trained"):
        pack(alike, SHARES[:2], heads=[CommonStart(2, 4)])


def result(model: Any, batch: Batch, router_loss: RouterLoss | None = None) -> tuple[LossSum, dict[str, Tensor]]:
    register_attention()
    mine = twin(model)
    mine.set_attn_implementation(PACKED)
    mine.set_experts_implementation("eager")
    family = family_of(mine)
    spec = family.head_spec(float32_product=False, chunk_tokens=5)
    policy = PolicyModel(mine, family, spec, router_loss=router_loss)
    output = policy(batch, NegativeLogLikelihood())
    assert isinstance(output, LossSum)
    output.loss.backward()
    return output, {name: value.grad for name, value in mine.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("kind", sorted(SETTINGS))
def test_loss_and_every_gradient_are_those_of_whole_sequences(kind: str) -> None:
    model = twin(strong_model(kind, scale=2.0), torch.float64)

    together, apart = result(model, shared()), result(model, pack(FLAT, SHARES, dtype=torch.float64))

    assert_close(together[0].loss, apart[0].loss, rtol=1e-9, atol=1e-9)
    assert_close(together[0].scores.logprobs, apart[0].scores.logprobs, rtol=1e-8, atol=1e-8)
    assert together[1].keys() == apart[1].keys()
    # transformers' norms and routers compute in float32 whatever the model does, and round in another order here.
    for name, gradient in together[1].items():
        assert float((gradient - apart[1][name]).norm()) <= 1e-6 * float(apart[1][name].norm()), name


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("sizes", [[5, 0], [0, 5], [0, 0], [5, 0, 0, 4]])
def test_a_sequence_that_adds_nothing_to_its_head_changes_nothing_of_others(sizes: list[int], follows: bool) -> None:
    model = twin(strong_model("llama", scale=2.0), torch.float64)
    members = group(sizes, 6) + (group([4], 3, 10) if follows else [])
    shares, heads = SHARES[: len(members)], [CommonStart(len(sizes), 6), CommonStart(1, 3)]

    batch = pack(members, shares, dtype=torch.float64, heads=heads[: 1 + follows])
    together, apart = result(model, batch), result(model, pack(members, shares, dtype=torch.float64))

    assert [example.tokens.tolist() for example in unpack(batch)] == [example.tokens.tolist() for example in members]
    assert_close(together[0].loss, apart[0].loss, rtol=1e-9, atol=1e-9)
    for name, gradient in together[1].items():
        assert float((gradient - apart[1][name]).norm()) <= 1e-6 * float(apart[1][name].norm()), name


@pytest.mark.parametrize("kind", ["sequence", "batch"])
def test_a_router_loss_takes_a_shared_head_for_each_of_its_sequences(kind: Any) -> None:
    model = twin(strong_model("mixtral", scale=2.0), torch.float64)
    loss = RouterLoss(kind, 0.5)
    uneven = [Share(1.0, 1.0 + number) for number in range(len(FLAT))]

    together = result(model, pack(FLAT, uneven, dtype=torch.float64, heads=HEADS), loss)
    apart = result(model, pack(FLAT, uneven, dtype=torch.float64), loss)
    without = result(model, shared())

    assert_close(together[0].sums["router/loss"], apart[0].sums["router/loss"], rtol=1e-9, atol=0)
    loads = [output.router_loads for output, _ in (together, apart)]
    assert loads[0].tolist() == loads[1].tolist()
    for name, gradient in together[1].items():
        assert float((gradient - apart[1][name]).norm()) <= 1e-6 * float(apart[1][name].norm()), name
    gate = "model.layers.0.mlp.gate.weight"
    assert float((together[1][gate] - without[1][gate]).norm()) > 1e-2 * float(without[1][gate].norm())


def test_the_flash_kernel_is_given_the_head_before_each_branch() -> None:
    """Attend run by run over the places it is given, the last query at the last key, and compare with the row."""
    batch = shared()
    documents = Documents.of(batch.lengths[0], torch.device("cpu"), batch.branches)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 35, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    places, queries, keys = key_places(documents.lengths, documents.branches)

    parts, start, first = [], 0, 0
    for count, seen in zip(queries, keys, strict=True):
        q, index = query[:, :, start : start + count], places[first : first + seen]
        mask = torch.ones(count, seen, dtype=torch.bool).tril(seen - count)
        parts.append(torch.nn.functional.scaled_dot_product_attention(q, key[:, :, index], value[:, :, index], mask))
        start, first = start + count, first + seen
    found = torch.cat(parts, 2).transpose(1, 2)

    expected, _ = packed_attention(torch.nn.Module(), query, key, value, None, documents=documents)
    assert sum(queries) == 35
    assert_close(found, expected, rtol=1e-12, atol=1e-12)


@given(st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=5)), max_size=8))
def test_units_keep_neighbours_together_while_they_fit(groups: list[tuple[int, list[int]]]) -> None:
    lengths = [head + own for head, parts in groups for own in parts]
    heads = [head for head, parts in groups for _ in parts]
    draws = [draw for draw, (_, parts) in enumerate(groups) for _ in parts]

    units = plan_units(lengths, heads, draws, 20)

    assert [index for unit in units for index in unit.members] == list(range(len(lengths)))
    for unit in units:
        own = sum(lengths[index] - heads[index] for index in unit.members)
        assert unit.tokens == own + heads[unit.members[0]] <= 20
        assert len({draws[index] for index in unit.members}) == 1
    for before, unit in zip(units, units[1:], strict=False):
        first = unit.members[0]
        alike = draws[before.members[0]] == draws[first]
        assert not alike or before.tokens + lengths[first] - heads[first] > 20


@pytest.mark.parametrize(
    ("head", "own", "share", "pays"),
    [
        (10, [2, 2, 2], 0.0, True),  # 20 tokens saved, and attention costs nothing
        # Pairs: alone 3 x 6^2 / 2 = 54, shared 2^2 / 2 + 3 x 4 x 6 = 74; 4 tokens pay for 20 pairs up to 0.2 each.
        (2, [4, 4, 4], 0.099, True),
        (2, [4, 4, 4], 0.101, False),
        # One long one: alone (3^2 + 3^2 + 12^2) / 2 = 81, shared 2 + 3 x 10 x 12 = 362; 4 tokens for 281 pairs.
        (2, [1, 1, 10], 0.007, True),
        (2, [1, 1, 10], 0.0072, False),
        (5, [3], 0.0, False),  # one alone shares with nobody
    ],
)
def test_a_head_is_shared_where_it_saves_more_than_unequal_completions_cost(
    head: int, own: list[int], share: float, pays: bool
) -> None:
    lengths = [head + size for size in own]
    (unit,) = plan_units(lengths, [head] * len(own), [0] * len(own), 1000)

    assert saves_work(unit, lengths, share) is pays
    assert [(part.members, part.tokens) for part in taken_apart(unit, lengths)] == [
        ((index,), length) for index, length in enumerate(lengths)
    ]


def test_heads_that_are_not_shared_make_units_of_one() -> None:
    units = plan_units([5, 5, 4], [0, 0, 0], [1, 1, 2], 20)

    assert [(unit.members, unit.tokens) for unit in units] == [((0,), 5), ((1,), 5), ((2,), 4)]


def test_the_first_own_token_is_predicted_by_the_last_of_the_head() -> None:
    batch = shared()

    places = predictors(batch)[batch.scored == 11]
    assert places.tolist() == [5]
