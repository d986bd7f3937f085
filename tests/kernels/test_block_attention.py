"""The kernel that reads blocks in place, by Triton's interpreter, against NumPy and against gathered blocks."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from holdfast.models.chunks.kernel_form import why_no_triton
from holdfast.rollout.local.block_attention import Operands, run_kernel
from holdfast.rollout.local.blocks import PADDING, RESERVED, SCRATCH
from holdfast.rollout.local.cache import BLOCK_SIZE, BlockCache, View, cached_attention

if why_no_triton() or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton and TRITON_INTERPRET=1: make test-kernels", allow_module_level=True)

SPLIT = 64
LENGTHS = [1, 15, 16, 17, SPLIT - 1, SPLIT, SPLIT + 1, 3 * SPLIT - 1, 3 * SPLIT, 3 * SPLIT + 1]
LIMITS = {torch.float64: 1e-9, torch.float32: 5e-6, torch.bfloat16: 1e-2}
"""Of the largest number of the result."""


class Case(NamedTuple):
    """Rows in blocks of one layer."""

    query: Tensor
    pair: tuple[Tensor, Tensor]
    tables: Tensor
    lengths: list[int]
    options: dict[str, Any]
    """window, softcap, sinks, scale"""

    def by_kernel(self, split: int = SPLIT) -> Tensor:
        positions = torch.tensor(self.lengths) - 1
        given = Operands.of(
            self.query, self.pair, self.tables, positions, max(self.lengths), split=split, **self.options
        )
        given.out.fill_(float("nan"))
        for part in given.parts or ():
            part.fill_(float("nan"))
        run_kernel(given)
        return given.out

    def gathered(self) -> Tensor:
        """Return what the form for gathered blocks gives, where nothing behind a row's end may be NaN."""
        cache = BlockCache()
        cache.pairs[0] = (self.pair[0].nan_to_num(0, 0, 0), self.pair[1].nan_to_num(0, 0, 0))
        cache.view = View.of(self.tables, torch.tensor(self.lengths)[:, None] - 1, max(self.lengths))
        rows, _, size = self.query.shape
        heads = self.pair[0].shape[2]
        new = [torch.zeros(rows, heads, 1, stored.shape[3], dtype=stored.dtype) for stored in cache.pairs[0]]
        for stored, written in zip(cache.pairs[0], new, strict=True):
            written[:] = stored.flatten(0, 1)[cache.view.written][:, :, None]
        key, value = cache.update(*new, 0)
        options = {"sliding_window": self.options["window"], "softcap": self.options["softcap"]}
        options |= {"s_aux": self.options["sinks"], "rows": cache}
        out, _ = cached_attention(nn.Module(), self.query[:, :, None], key, value, None, self.options["scale"], **options)
        assert size == key.shape[3]
        return out[:, 0]

    def oracle(self) -> NDArray[np.float64]:
        """Return attention of each row by its own numbers, one head at a time."""
        keys, values = (stored.double().numpy() for stored in self.pair)
        query, heads, key_heads = self.query.double().numpy(), self.query.shape[1], keys.shape[2]
        out = np.zeros((*query.shape[:2], values.shape[3]))
        for row, length in enumerate(self.lengths):
            window = self.options["window"]
            places = range(0 if window is None else max(0, length - window), length)
            blocks = self.tables[row].tolist()
            at = [(blocks[place // BLOCK_SIZE], place % BLOCK_SIZE) for place in places]
            for head in range(heads):
                key_head = head // (heads // key_heads)
                scale = self.options["scale"] or query.shape[2] ** -0.5
                scores = np.array([query[row, head] @ keys[block, offset, key_head] for block, offset in at]) * scale
                if (cap := self.options["softcap"]) is not None:
                    scores = cap * np.tanh(scores / cap)
                sinks = self.options["sinks"]
                beside = [] if sinks is None else [float(sinks[head])]
                weights = np.exp(scores - max([*scores, *beside]))
                total = weights.sum() + sum(np.exp(sink - max([*scores, *beside])) for sink in beside)
                out[row, head] = weights / total @ np.array([values[block, offset, key_head] for block, offset in at])
        return out


def case_of(  # noqa: PLR0913 - what a case is made of
    lengths: list[int],
    generator: np.random.Generator,
    *,
    dtype: torch.dtype = torch.float64,
    key_heads: int = 2,
    group: int = 2,
    sizes: tuple[int, int] = (32, 32),
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    scale: float | None = None,
    fillers: int = 1,
) -> Case:
    """Return rows with shuffled blocks, of which they share some; what no row has is NaN or infinite."""
    needed = [-(-length // BLOCK_SIZE) for length in lengths]
    count, longest = sum(needed), max(needed) + 1
    free = list(RESERVED + generator.permutation(count + 3))
    tables = np.full((len(lengths) + fillers, longest), PADDING)
    tables[len(lengths) :] = SCRATCH
    used = [SCRATCH]
    for row, blocks in enumerate(needed):
        tables[row, :blocks] = [free.pop() for _ in range(blocks)]
        if row and blocks > 1 and needed[row - 1] > 1 and lengths[row - 1] >= BLOCK_SIZE:
            tables[row, 0] = tables[row - 1, 0]  # of a prompt that both have
        used += tables[row, :blocks].tolist()
    pair = []
    for size in sizes:
        stored = generator.standard_normal((RESERVED + count + 3, BLOCK_SIZE, key_heads, size))
        for block in set(range(len(stored))) - set(used):
            stored[block] = generator.choice([np.nan, np.inf, -np.inf])
        pair.append(stored)
    for row, length in enumerate(lengths):
        if length % BLOCK_SIZE:
            for stored in pair:
                stored[tables[row, length // BLOCK_SIZE], length % BLOCK_SIZE :] = np.nan
    heads = key_heads * group
    whole = [*lengths, *range(1, fillers + 1)]
    query = torch.from_numpy(generator.standard_normal((len(whole), heads, sizes[0]))).to(dtype)
    options = {
        "window": window,
        "softcap": softcap,
        "sinks": torch.from_numpy(generator.standard_normal(heads)).to(dtype) if sinks else None,
        "scale": scale,
    }
    keys, values = (torch.from_numpy(stored).to(dtype) for stored in pair)
    return Case(query, (keys, values), torch.from_numpy(tables), whole, options)


def assert_close(found: Tensor, expected: NDArray[np.float64] | Tensor, limit: float) -> None:
    other = torch.as_tensor(expected).double()
    assert found.isfinite().all()
    assert float((found.double() - other).abs().max()) <= limit * float(other.abs().max())


ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.11},
    "window": {"window": 40},
    "window of a split": {"window": SPLIT},
    "soft cap": {"softcap": 1.5, "scale": 1.0},
    "sinks": {"sinks": True},
    "all": {"window": 21, "softcap": 2.0, "sinks": True, "scale": 0.7},
}


@pytest.mark.parametrize("dtype", LIMITS, ids=["64", "32", "16"])
@pytest.mark.parametrize("options", ASKED.values(), ids=ASKED)
def test_blocks_read_in_place_give_what_numpy_and_gathered_blocks_give(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    case = case_of(LENGTHS, np.random.default_rng(1), dtype=dtype, **options)

    found = case.by_kernel()

    assert_close(found, case.oracle(), LIMITS[dtype])
    assert_close(found, case.gathered(), LIMITS[dtype])
