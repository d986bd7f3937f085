"""Attention as one operation of a compiled block is the eager form, whatever the documents."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.models.layers.attention import packed_attention
from holdfast.models.layers.document_attention import (
    AttentionOptions,
    Documents,
    attend_as_operation,
    attend_in_documents,
    read_layout,
)

HEADS, KEY_HEADS, SIZE = 4, 2, 8
CPU = torch.device("cpu")

OPTIONS = [
    pytest.param(AttentionOptions(None, None, None, 0.0), False, id="plain"),
    pytest.param(AttentionOptions(0.3, 3, None, 0.0), False, id="window"),
    pytest.param(AttentionOptions(0.3, None, 2.0, 0.0), False, id="softcap"),
    pytest.param(AttentionOptions(None, 5, 2.0, 0.0), True, id="window, softcap and sinks"),
]


def drawn(seed: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Draw documents, some of whose branches share a head, which may be empty."""
    draw = random.Random(seed)
    lengths, branches = [], []
    for _ in range(draw.randint(1, 5)):
        parts = tuple(draw.randint(1, 6) for _ in range(draw.choice((0, 0, 1, 3))))
        branches.append(parts)
        lengths.append(sum(parts) + draw.randint(0 if parts else 1, 7))
    return tuple(lengths), tuple(branches)


def operands(tokens: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, HEADS, tokens, SIZE), (1, KEY_HEADS, tokens, SIZE), (1, KEY_HEADS, tokens, SIZE), (HEADS,)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


class Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("branches", [(), (3, 2)], ids=["plain", "of branches"])
def test_many_documents_are_laid_out_by_as_many_operations_as_two(branches: tuple[int, ...]) -> None:
    counts = []
    for documents in (2, 64):
        with Operations() as operations:
            Documents.of((9,) * documents, CPU, (branches,) * documents)
        counts.append(operations.count)

    assert counts[0] == counts[1]


@pytest.mark.parametrize("seed", range(40))
def test_a_layout_is_read_as_it_was_written(seed: int) -> None:
    lengths, branches = drawn(seed)

    assert read_layout(Documents.of(lengths, CPU, branches).layout) == (lengths, branches)


@pytest.mark.parametrize(("options", "with_sinks"), OPTIONS)
@pytest.mark.parametrize("seed", range(6))
def test_the_operation_is_the_eager_form_with_its_gradients(
    options: AttentionOptions, with_sinks: bool, seed: int
) -> None:
    lengths, branches = drawn(seed)
    *tensors, sinks = operands(sum(lengths), seed)
    leaves = [*tensors, sinks] if with_sinks else tensors
    asked_sinks = sinks if with_sinks else None
    layout = Documents.of(lengths, CPU, branches).layout

    expected = attend_in_documents(*tensors, asked_sinks, lengths, branches, options)  # type: ignore[misc]
    found = attend_as_operation(*tensors, asked_sinks, layout, options)  # type: ignore[misc]

    assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.sin(torch.arange(expected.numel(), dtype=torch.float64)).view_as(expected)
    pairs = [torch.autograd.grad((out * weights).sum(), leaves) for out in (found, expected)]
    for slope, expected_slope in zip(*pairs, strict=True):
        assert_close(slope, expected_slope, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own, of its check
@pytest.mark.parametrize(("options", "with_sinks"), OPTIONS)
def test_torch_finds_the_operation_well_formed(options: AttentionOptions, with_sinks: bool) -> None:
    lengths, branches = (5, 4), ((), (2, 1))
    *tensors, sinks = operands(9, 0)
    layout = Documents.of(lengths, CPU, branches).layout

    torch.library.opcheck(
        torch.ops.holdfast.documents_attention.default,
        (*tensors, sinks if with_sinks else None, layout, options.scaling, options.window, options.softcap),
    )


class Block(nn.Module):
    """A block as a compiler sees it: a product, attention, a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(HEADS * SIZE, (HEADS + 2 * KEY_HEADS) * SIZE, dtype=torch.float64)

    def forward(self, states: Tensor, documents: Documents) -> Tensor:
        heads = self.inputs(states).view(1, -1, HEADS + 2 * KEY_HEADS, SIZE).transpose(1, 2)
        query, key, value = heads.split((HEADS, KEY_HEADS, KEY_HEADS), 1)
        options: dict[str, Any] = {"documents": documents}
        attended, _ = packed_attention(self, query, key, value, None, **options)
        return states + attended.flatten(2)


def test_one_program_serves_documents_of_any_lengths_and_blocks_of_a_kind() -> None:
    """The compiler's front end alone runs here, which decides how many programs there are."""
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    blocks = nn.ModuleList(Block() for _ in range(3))
    for block in blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    for seed in range(30):
        lengths, branches = drawn(seed)
        generator = torch.Generator().manual_seed(seed)
        states = torch.randn(
            1, sum(lengths), HEADS * SIZE, generator=generator, dtype=torch.float64, requires_grad=True
        )
        documents = Documents.of(lengths, CPU, branches)
        outcomes = []
        for eager in (False, True):
            with torch.compiler.set_stance("force_eager" if eager else "default"):
                out = states
                for block in blocks:
                    out = block(out, documents)
            outcomes.append((out, *torch.autograd.grad(out.square().sum(), [states, *blocks.parameters()])))
        for found, expected in zip(*outcomes, strict=True):
            assert_close(found, expected, rtol=1e-10, atol=1e-10)
        if seed == 4:
            early = counters["stats"]["unique_graphs"]
    # The first block's input is a leaf; the first length is taken for a constant until a second one comes.
    assert counters["stats"]["unique_graphs"] == early <= 4
    assert not counters["graph_break"]
