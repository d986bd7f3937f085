"""Gradients in float32 reach the parameters of a single rank as they are, beside those of copies in bfloat16."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from holdfast.models.scores import WithGradients, taker_of
from holdfast.parallel.copies import attach_copies, copies_of

TOKENS, WIDTH = 6, 4


class Language(nn.Module):
    """An embedding and a head, whose gradients are given."""

    def __init__(self, *, tied: bool, reads: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.reads = reads

    def forward(self, by_weight: Tensor) -> Tensor:
        hidden = self.embedding(torch.arange(TOKENS))
        hidden = hidden if self.reads else hidden.detach()
        weight = self.head.weight
        assert weight.dtype == torch.bfloat16
        parts = [torch.full_like(hidden, 0.25) if self.reads else None, by_weight.clone(), None]
        found: Tensor = WithGradients.apply(hidden, weight, None, hidden.float().sum(), parts, taker_of(weight))  # type: ignore[no-untyped-call]
        return found


@pytest.mark.parametrize("reads", [True, False], ids=["", "no gradient of states"])
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_a_wide_gradient_is_added_up_unrounded_and_told_once_in_each_pass(tied: bool, reads: bool) -> None:
    torch.manual_seed(0)
    model = Language(tied=tied, reads=reads)
    attach_copies(model, torch.bfloat16, [("embedding.weight",), *([] if tied else [("head.weight",)])], [])
    weight, told = model.head.weight, []
    weight.register_post_accumulate_grad_hook(lambda value: told.append(value.grad is not None))  # type: ignore[no-untyped-call]
    first, second = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)

    for number, by_weight in enumerate((first, second), 1):
        (model(by_weight) * 0.5).backward()
        assert told == [True] * number
        assert model.head.weight is weight, "the copies have left"

    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    of_states = 0.125 if tied and reads else 0.0
    assert torch.equal(weight.grad, 0.5 * first + of_states + 0.5 * second + of_states)


@pytest.mark.parametrize("remade", [False, True], ids=["freed", "made again"])
def test_copies_that_were_freed_take_no_memory(remade: bool) -> None:
    model = Language(tied=False, reads=True)
    attach_copies(model, torch.bfloat16, [("embedding.weight",), ("head.weight",)], [])
    model(torch.randn(TOKENS, WIDTH)).backward()
    copies = copies_of(model)
    assert copies is not None
    gone = [weakref.ref(copy) for copy in copies.tensors]

    copies.free()
    if remade:
        model(torch.randn(TOKENS, WIDTH)).backward()
    gc.collect()

    assert len(gone) == 2
    assert [reference() for reference in gone] == [None, None]
    assert len(copies.tensors) == (2 if remade else 0)
