"""Saved tensors leave the device block by block and come back bit for bit."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from holdfast.errors import ModelError
from holdfast.models.names import canonical_name
from holdfast.parallel.activations import ActivationOffload, OffloadedBlock, piece_sizes

TOKENS, WIDTH, FFN = 96, 32, 80
FLOAT = 4


class Block(nn.Module):
    """x + down(gelu(up(x)) * scale), of which a backward pass reads x, up(x), scale and the product with it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)
        self.recomputed = False

    def forward(self, hidden: Tensor, scale: Tensor) -> Tensor:
        if self.recomputed:
            result: Tensor = checkpoint(self.computed, hidden, scale, use_reentrant=False)
            return result
        return self.computed(hidden, scale)

    def computed(self, hidden: Tensor, scale: Tensor) -> Tensor:
        result: Tensor = hidden + self.down(nn.functional.gelu(self.up(hidden)) * scale)
        return result


def model(blocks: int = 4, *, recomputed: bool = False) -> nn.ModuleList:
    torch.manual_seed(0)
    made = nn.ModuleList(Block() for _ in range(blocks))
    for block in made:
        block.recomputed = recomputed
    return made


def offloaded(plain: nn.ModuleList) -> tuple[nn.ModuleList, ActivationOffload]:
    offload, blocks = ActivationOffload("cpu"), copy.deepcopy(plain)
    last = blocks[-1]
    return nn.ModuleList(OffloadedBlock(block, offload, stays=block is last) for block in blocks), offload


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    return hidden.requires_grad_(), torch.randn(TOKENS, FFN, generator=generator)


def passed(blocks: nn.ModuleList, passes: int = 1) -> dict[str, Tensor]:
    """Return what the passes end with and every gradient, the input's included."""
    hidden, scale = inputs()
    results = []
    for _ in range(passes):
        result = hidden
        for block in blocks:
            result = block(result, scale)
        results.append(result)
    loss = torch.stack(results).square().sum()
    loss.backward()
    gradients = {
        canonical_name(name): value.grad for name, value in blocks.named_parameters() if value.grad is not None
    }
    assert hidden.grad is not None
    return {"loss": loss.detach(), "hidden": hidden.grad} | gradients


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_are_those_without_offloading_to_the_bit(recomputed: bool, passes: int) -> None:
    plain = model(recomputed=recomputed)
    blocks, offload = offloaded(plain)

    found, expected = passed(blocks, passes), passed(plain, passes)

    assert offload.copied_bytes
    assert_equal(found, expected)


def test_what_a_block_computes_is_copied_and_parameters_and_shared_inputs_are_not() -> None:
    blocks, offload = offloaded(model())

    passed(blocks)

    # Of a block: its input and two of [tokens, ffn]; `scale`, which all blocks share, and the last block stay.
    assert offload.copied_bytes == 3 * FLOAT * TOKENS * (WIDTH + 2 * FFN)


@given(st.integers(1, 2**36))
def test_pinned_pieces_hold_a_storage_and_waste_less_than_an_eighth(size: int) -> None:
    sizes = piece_sizes(size)

    assert sum(sizes) == size
    assert len(sizes) <= 4
    pinned = sum(1 << (piece - 1).bit_length() for piece in sizes)  # as torch's CachingHostAllocator rounds
    assert pinned - size < size / 8


def test_of_recomputed_blocks_their_inputs_alone_are_copied() -> None:
    blocks, offload = offloaded(model(recomputed=True))

    passed(blocks)

    assert offload.copied_bytes == 3 * FLOAT * TOKENS * WIDTH


def test_frozen_weights_and_buffers_are_never_copied() -> None:
    plain = model()
    for block in plain:
        block.up.weight.requires_grad_(requires_grad=False)
        del block.down.bias
        block.down.register_parameter("bias", None)
        block.register_buffer("scales", torch.ones(TOKENS, FFN))
        block.register_forward_pre_hook(lambda module, args: (args[0], args[1] * 1 * module.scales))
    blocks, offload = offloaded(plain)

    found, expected = passed(blocks), passed(plain)

    assert_equal(found, expected)
    # Of a block: up(x), the product, and `scale`, which is each block's own now. Nothing reads the input.
    assert offload.copied_bytes == 3 * FLOAT * TOKENS * 3 * FFN


def test_what_a_block_saved_is_freed_when_the_next_block_has_run() -> None:
    blocks, _ = offloaded(model())
    references: list[Any] = []
    alive: list[list[bool]] = []

    def note(*_: object) -> None:
        alive.append([reference() is not None for reference in references])

    for block in blocks:
        block.register_forward_pre_hook(note)
        block.up.register_forward_hook(lambda _, __, up: references.append(weakref.ref(up.untyped_storage())))

    passed(blocks)

    assert alive == [[], [True], [False, True], [False, False, True]]
    assert not any(reference() for reference in references)


def test_a_pass_without_gradients_copies_nothing() -> None:
    blocks, offload = offloaded(model())
    hidden, scale = inputs()

    with torch.no_grad():
        for block in blocks:
            hidden = block(hidden, scale)

    assert offload.copied_bytes == 0


def test_a_forward_pass_that_failed_leaves_the_next_one_whole() -> None:
    plain = model()
    blocks, _ = offloaded(plain)
    hidden, scale = inputs()
    with pytest.raises(RuntimeError, match="must match"):
        blocks[1](blocks[0](hidden, scale), scale[:, :3])

    assert_equal(passed(blocks), passed(plain))


def test_views_of_one_storage_are_copied_once_and_keep_their_strides() -> None:
    class Transposed(nn.Module):
        def forward(self, hidden: Tensor, _: Tensor) -> Tensor:
            wide = hidden * 2
            return hidden + (wide.t()[::2] * wide[:, ::2].t()).sum() * wide

    plain = nn.ModuleList(Transposed() for _ in range(2))
    blocks, offload = offloaded(plain)

    found, expected = passed(blocks), passed(plain)

    assert_equal(found, expected)
    assert offload.copied_bytes == FLOAT * (TOKENS * WIDTH)


class KeepsResult(nn.Module):
    """sigmoid(x), whose backward pass reads what it returns; `fails` and `changes` say what goes wrong behind it."""

    def __init__(self, *, fails: bool = False, changes: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.fails, self.changes = fails, changes
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, hidden: Tensor) -> Tensor:
        result = self.up(hidden).sigmoid()
        self.seen.append(weakref.ref(result))
        after = result + 0
        if self.fails:
            raise MemoryError
        if self.changes:
            result.mul_(2)
        return after + result


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("ending", ["dropped", "failed forward", "failed backward"])
def test_a_pass_that_does_not_end_keeps_no_memory(stays: bool, ending: str) -> None:
    block = KeepsResult(fails=ending == "failed forward")
    wrapped, hidden = OffloadedBlock(block, ActivationOffload("cpu"), stays=stays), inputs()[0]

    def fail(_: Tensor) -> None:
        raise ValueError

    with suppress(MemoryError, ValueError):
        result = wrapped(hidden)
        if ending == "failed backward":
            result.register_hook(fail)
            result.sum().backward()
    result = None
    gc.collect()

    assert [reference() for reference in block.seen] == [None]


@pytest.mark.parametrize("stays", [True, False])
def test_a_block_that_changes_what_it_saved_in_place_is_refused_as_autograd_does(stays: bool) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        KeepsResult(changes=True)(inputs()[0]).sum().backward()
    wrapped = OffloadedBlock(KeepsResult(changes=True), ActivationOffload("cpu"), stays=stays)

    with pytest.raises(ModelError, match=r"changes in place what its backward pass needs, a tensor of \(\d+, \d+\)"):
        wrapped(inputs()[0]).sum().backward()
