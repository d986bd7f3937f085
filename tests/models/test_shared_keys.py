"""Keys of shared heads are repeated as by an index, and their gradients are its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.profiler import profile

from holdfast.models.layers.document_attention import Documents
from holdfast.models.layers.shared_keys import SharedKeys, key_places, repeat_keys
from tests.models.test_document_attention import CPU, drawn

SIZE, HEADS = 8, 2


def with_branches(seed: int) -> tuple[SharedKeys, int]:
    lengths, branches = drawn(seed)
    while not any(branches):
        seed += 1_000
        lengths, branches = drawn(seed)
    shared = Documents.of(lengths, CPU, branches).runs.shared
    assert shared is not None
    return shared, sum(lengths)


def inputs(where: SharedKeys, tokens: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, HEADS, tokens, SIZE, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    gradient = torch.randn(1, HEADS, len(where.places), SIZE, generator=draw, dtype=torch.float64).to(dtype)
    return keys, gradient


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_keys_and_gradients_have_the_bits_of_an_index(seed: int, dtype: torch.dtype) -> None:
    where, tokens = with_branches(seed)
    keys, gradient = inputs(where, tokens, seed, dtype)
    indexed = keys[:, :, where.places]

    repeated = repeat_keys(keys, where)

    assert torch.equal(repeated, indexed)
    (found,), (expected,) = (torch.autograd.grad(each, keys, gradient) for each in (repeated, indexed))
    assert torch.equal(found, expected)


def test_gradients_in_bfloat16_are_rounded_once() -> None:
    where, tokens = with_branches(0)
    keys, gradient = inputs(where, tokens, 0, torch.bfloat16)
    wide = keys.detach().double().requires_grad_()

    (found,) = torch.autograd.grad(repeat_keys(keys, where), keys, gradient)

    (exact,) = torch.autograd.grad(wide[:, :, where.places], wide, gradient.double())
    assert float(((found.double() - exact).abs() / exact.abs().clamp(min=1e-3)).max()) <= 2.0**-8


def test_torch_finds_the_operation_well_formed() -> None:
    where, tokens = with_branches(3)
    keys, _ = inputs(where, tokens, 3, torch.float64)

    operation: Any = torch.ops.holdfast.repeat_keys
    torch.library.opcheck(operation, (keys, where.places, where.own, where.shared, where.counts))


def test_nothing_is_sorted_and_nothing_accumulated_by_an_index_on_the_way_back() -> None:
    where, tokens = with_branches(5)
    keys, gradient = inputs(where, tokens, 5, torch.float32)
    repeated = repeat_keys(keys, where)

    with profile() as profiled:
        repeated.backward(gradient)

    names = {event.name for event in profiled.events() or []}
    assert "aten::index_copy_" in names
    assert not [name for name in names if "sort" in name or "index_put" in name or "index_add" in name]


def test_heads_with_unequal_numbers_of_branches_come_back_turn_by_turn() -> None:
    places, *_ = key_places((5, 6, 2), ((1, 1), (1, 1, 1), ()))

    found = SharedKeys.of(places)

    assert found.own.tolist() == [0, 1, 2, 6, 10, 11, 12, 13, 17, 21, 25, 26, 27]
    assert found.counts.tolist() == [6, 6, 3]
    assert found.shared.tolist() == [5, 6, 7, 0, 1, 2, 14, 15, 16, 3, 4, 5, 18, 19, 20, 7, 8, 9, 22, 23, 24]


def test_one_program_serves_heads_and_branches_of_any_number() -> None:
    programs = 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal programs
        programs += 1
        return graph

    compiled: Any = torch.compile(lambda keys, where: repeat_keys(keys * 2, where) * 2, backend=backend, fullgraph=True)
    layouts = [with_branches(seed) for seed in range(12)]
    for seed, (where, tokens) in enumerate(layouts):
        if not len(where.shared):
            continue  # heads without a token: sizes of 0 are constants to the compiler
        keys, gradient = inputs(where, tokens, seed, torch.float32)
        torch._dynamo.maybe_mark_dynamic(keys, 2)
        (found,) = torch.autograd.grad(compiled(keys, where), keys, gradient)
        assert torch.equal(found, torch.autograd.grad(repeat_keys(keys * 2, where) * 2, keys, gradient)[0])

    assert programs == 1
