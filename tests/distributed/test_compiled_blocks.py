"""Blocks that the compiler's front end took: the numbers of eager ones, and few programs, whatever the documents are.

Code of the compiler's back end runs in test_compile.py, which takes minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases import rows_of, settings, train
from tests.distributed.compile_cases import train_compiled
from tests.distributed.test_split_invariance import assert_same
from tests.tiny import tiny_directory

ROWS = rows_of(240)
BLOCKS = {"compile": "blocks"}

KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "plain": ("llama", {}, 4),
    "lora": ("llama", {"model": {"lora": {"rank": 2}}}, 8),
    "recomputed": ("llama", {"parallel": {"recompute": "full"}}, 5),
    "frozen": ("llama", {"model": {"freeze": ["embed_tokens", r"layers\.0\."]}}, 8),
    "windows and caps": ("gemma2", {}, 8),
    "sinks": ("gpt_oss", {}, 32),
    "padded": ("llama", {"data": {"packing": "none"}}, 8),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_blocks_train_as_eager_ones_by_few_programs(pools: Any, tmp_path: Path, kind: str, ranks: int) -> None:
    architecture, sections, most_graphs = KINDS[kind]
    path = str(tiny_directory(tmp_path, architecture))
    data = {"tokens_per_micro_batch": 96} | sections.get("data", {})
    tree = settings(path, **sections | {"data": data})
    compiled = tree | {"parallel": tree.get("parallel", {}) | BLOCKS}

    expected = pools(ranks).run(train, tree, ROWS, 30)[0]
    found = pools(ranks).run(train_compiled, compiled, ROWS, 30, False)[0]

    assert_same(found, expected, 1e-9)
    # The eager form of gpt-oss's experts, which float64 needs, asks which experts have tokens.
    assert all("aten.nonzero" in reason for reason in found["breaks"]) if kind == "sinks" else not found["breaks"]
    assert 0 < found["graphs"] <= most_graphs
    (line,) = found["printed"]
    assert line.startswith("blocks: compiled in ")


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_that_do_not_compile_run_uncompiled_and_are_named(pools: Any, tmp_path: Path, ranks: int) -> None:
    tree = settings(str(tiny_directory(tmp_path, "llama")))
    compiled = tree | {"parallel": BLOCKS}

    expected = pools(ranks).run(train, tree, ROWS, 3)[0]
    found = pools(ranks).run(train_compiled, compiled, ROWS, 3, True)[0]

    assert_same(found, expected, 0.0)
    (line,) = found["printed"]
    assert line.startswith("blocks: not compiled, since the check before step 1 failed with them (")
    assert "no C++ compiler was found" in line
