"""The kernel that reads blocks in place, by Triton's interpreter, against NumPy and against gathered blocks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.models.chunks.kernel_form import why_no_triton
from holdfast.rollout.engine import generate
from holdfast.rollout.local.block_attention import InPlace, Operands, run_kernel
from holdfast.rollout.local.blocks import PADDING, RESERVED, SCRATCH
from holdfast.rollout.local.cache import BLOCK_SIZE, BlockCache, View, cached_attention
from tests.rollout.recorders import Steps
from tests.rollout.test_graphs import assert_same, recorded_engine
from tests.rollout.test_inprocess import engine_of, reference, requests

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
        rows, heads = len(self.query), self.pair[0].shape[2]
        new = [torch.zeros(rows, heads, 1, stored.shape[3], dtype=stored.dtype) for stored in cache.pairs[0]]
        for stored, written in zip(cache.pairs[0], new, strict=True):
            written[:] = stored.flatten(0, 1)[cache.view.written][:, :, None]
        key, value = cache.update(*new, 0)
        options = {"sliding_window": self.options["window"], "softcap": self.options["softcap"]}
        options |= {"s_aux": self.options["sinks"], "rows": cache}
        query, scale = self.query[:, :, None], self.options["scale"]
        return cached_attention(nn.Module(), query, key, value, None, scale, **options)[0][:, 0]

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


@pytest.mark.parametrize("group", [1, 2, 7, 8])
def test_queries_that_share_a_key_head_are_kept_apart(group: int) -> None:
    case = case_of([3, 70], np.random.default_rng(2), group=group, key_heads=3, sinks=True)

    assert_close(case.by_kernel(), case.oracle(), 1e-9)


@pytest.mark.parametrize("sizes", [(64, 64), (80, 80), (128, 128), (24, 16), (16, 40), (192, 128)])
def test_heads_have_any_size_and_values_another(sizes: tuple[int, int]) -> None:
    case = case_of([5, 81], np.random.default_rng(3), sizes=sizes, window=30)

    assert_close(case.by_kernel(), case.oracle(), 1e-9)


def test_one_split_and_several_give_the_same() -> None:
    case = case_of([1, 100, 200], np.random.default_rng(4), window=90, softcap=2.0, sinks=True)

    assert_close(case.by_kernel(split=256), case.oracle(), 1e-9)
    assert_close(case.by_kernel(split=64), case.by_kernel(split=256), 1e-12)


def test_a_number_that_is_none_spreads_to_its_own_row_alone() -> None:
    case = case_of([70, 70], np.random.default_rng(5), fillers=0)
    case.pair[0][case.tables[1, 3], 2, 0] = float("nan")

    found = case.by_kernel()

    assert found[0].isfinite().all()
    assert found[1, :2].isnan().all()
    assert found[1, 2:].isfinite().all()


@pytest.mark.parametrize("seed", range(6))
def test_drawn_cases_agree_with_numpy(seed: int) -> None:
    generator = np.random.default_rng([17, seed])
    drawn = lambda *some: some[generator.integers(len(some))]  # noqa: E731 - one option of several
    case = case_of(
        generator.integers(1, 150, 4).tolist(),
        generator,
        dtype=drawn(*LIMITS),
        key_heads=drawn(1, 2, 3),
        group=drawn(1, 2, 5, 7, 16, 17),
        sizes=drawn((16, 16), (40, 40), (64, 32)),
        window=drawn(None, 1, 15, 16, 17, 64, 65, 100),
        softcap=drawn(None, 0.5, 30.0),
        sinks=drawn(False, True),
        scale=drawn(None, 0.3),
        fillers=drawn(0, 3),
    )

    assert_close(case.by_kernel(), case.oracle(), LIMITS[case.query.dtype])


KINDS = ["qwen3", "qwen2", "gemma2", "gpt_oss"]
SAMPLING = SamplingConfig(max_new_tokens=12, temperature=1.3)


@pytest.mark.parametrize("recorded", [False, True], ids=["operations", "fixed memory"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_reads_in_place_draws_what_one_that_gathers_draws(kind: str, *, recorded: bool) -> None:
    model, asked = reference(kind), requests(2, 3, shortest=13)
    engine = recorded_engine(model, Steps()) if recorded else engine_of(model)
    engine.in_place, calls = counted(run_kernel)

    found = generate(engine, asked, SAMPLING)

    assert engine.in_place.agrees
    assert len(calls) >= 2 * SAMPLING.max_new_tokens, "two layers, one step that is compared and those that draw"
    assert_same(found, generate(engine_of(model), asked, SAMPLING))


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_an_engine_in_single_precision_draws_the_same_tokens(kind: str) -> None:
    model, asked = reference(kind).float(), requests(2, 3)
    engine = engine_of(model, dtype=torch.float32)
    engine.in_place = InPlace()

    found = generate(engine, asked, SAMPLING)

    assert engine.in_place.agrees
    assert_same(found, generate(engine_of(model, dtype=torch.float32), asked, SAMPLING), 1e-4)


def counted(kernel: Callable[[Operands], None]) -> tuple[InPlace, list[int]]:
    """Return what reads in place by a kernel, and the rows of each of its calls."""
    calls: list[int] = []

    def run(given: Operands) -> None:
        calls.append(len(given.query))
        kernel(given)

    return InPlace(run), calls


def other_rows(given: Operands) -> Operands:
    return given._replace(tables=given.tables.roll(1, 0).contiguous())


FAULTS: dict[str, tuple[str, Callable[[Operands], Operands]]] = {
    "a window too long by one": ("qwen2", lambda given: given._replace(window=given.window and given.window + 1)),
    "a window too short by one": ("qwen2", lambda given: given._replace(window=given.window and given.window - 1)),
    "no window": ("qwen2", lambda given: given._replace(window=None)),
    "no scale": ("qwen3", lambda given: given._replace(scale=1.0)),
    "the scale twice": ("qwen3", lambda given: given._replace(scale=given.scale**2)),
    "the neighbour's blocks": ("qwen3", other_rows),
    "without the last token": ("qwen3", lambda given: given._replace(positions=given.positions - 1)),
    "with a token that is none yet": ("qwen3", lambda given: given._replace(positions=given.positions + 1)),
    "no soft cap": ("gemma2", lambda given: given._replace(softcap=None)),
    "no sinks": ("gpt_oss", lambda given: given._replace(sinks=None)),
    "keys for values": ("qwen3", lambda given: given._replace(pair=given.pair[:1] * 2)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_that_computes_otherwise_is_found_out_and_not_used(
    fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, change = FAULTS[fault]
    model, asked = reference(kind), requests(2, 3, shortest=13)
    engine = engine_of(model)
    engine.in_place, calls = counted(lambda given: run_kernel(change(given)))

    found = generate(engine, asked, SAMPLING)

    assert engine.in_place.agrees is False
    assert len(calls) == 2, "once in each layer"
    lines = [line for line in capsys.readouterr().out.splitlines() if "attention gathers" in line]
    assert len(lines) == 1
    assert "since the kernel that reads them in place differs by" in lines[0]
    assert_same(found, generate(engine_of(model), asked, SAMPLING))


@pytest.mark.parametrize("seed", range(8))
def test_a_kernel_that_reads_one_drawn_number_wrong_is_found_out(seed: int) -> None:
    generator = np.random.default_rng([23, seed])
    layer, calls = int(generator.integers(2)), []

    def wrong(given: Operands) -> None:
        calls.append(given)
        if len(calls) == layer + 1:
            row = int(generator.integers(len(given.query)))
            head = int(generator.integers(given.pair[0].shape[2]))
            token = int(generator.integers(int(given.positions[row]) + 1))
            pair = [stored.clone() for stored in given.pair]
            at = int(given.tables[row, token // BLOCK_SIZE]), token % BLOCK_SIZE, head
            pair[int(generator.integers(2))][at] *= -1
            given = given._replace(pair=(pair[0], pair[1]))
        run_kernel(given)

    engine = engine_of(reference("qwen3"))
    engine.in_place = InPlace(wrong)

    generate(engine, requests(2, 3), SAMPLING)

    assert engine.in_place.agrees is False


def test_a_kernel_that_fails_is_named_and_blocks_are_gathered(capsys: pytest.CaptureFixture[str]) -> None:
    def without_compiler(_: Operands) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore")

    model, asked = reference("qwen3"), requests(2, 3)
    engine = recorded_engine(model, Steps())
    engine.in_place = InPlace(without_compiler)

    found = generate(engine, asked, SAMPLING)

    assert capsys.readouterr().out.splitlines() == [
        "rollouts: attention gathers blocks from here on, since the kernel that reads them in place failed "
        "(RuntimeError: Failed to find C compiler. Please specify via CC environment variable.)"
    ]
    assert_same(found, generate(engine_of(model), asked, SAMPLING))
