"""Blocks that the compiler's front end took: the numbers of eager ones, and few programs, whatever the documents are.

Code of the compiler's back end runs in test_compile.py, which takes minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.metrics.sink import read_metrics
from holdfast.training.directory import events
from tests.distributed.cases import rows_of, settings, train
from tests.distributed.compile_cases import runs_of_forms, train_compiled
from tests.distributed.test_split_invariance import assert_same
from tests.tiny import tiny_directory
from tests.training.cases import run, tree

ROWS = rows_of(240)
BLOCKS = {"compile": "blocks"}

KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "plain": ("llama", {}, 4),
    "lora": ("llama", {"model": {"lora": {"rank": 2}}}, 8),
    "recomputed": ("llama", {"parallel": {"recompute": "full"}}, 5),
    "frozen": ("llama", {"model": {"freeze": ["embed_tokens", r"layers\.0\."]}}, 8),
    "windows and caps": ("gemma2", {}, 8),
    "sinks": ("gpt_oss", {}, 32),
    "sinks, grouped experts": ("gpt_oss", {"model": {"dtype": "float32"}}, 8),
    # A program more than a dense block has: routers tell what they chose in training, and not in the check before it.
    "grouped experts": ("qwen3_moe", {"model": {"dtype": "float32"}}, 5),
    "padded": ("llama", {"data": {"packing": "none"}}, 8),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_blocks_train_as_eager_ones_by_few_programs(pools: Any, tmp_path: Path, kind: str, ranks: int) -> None:
    architecture, sections, most_graphs = KINDS[kind]
    path = str(tiny_directory(tmp_path, architecture))
    data = {"tokens_per_micro_batch": 96} | sections.get("data", {})
    tree = settings(path, **sections | {"data": data})
    compiled = tree | {"parallel": tree.get("parallel", {}) | BLOCKS}

    expected = pools(ranks).run(train, tree, ROWS, 30)[0]
    found = pools(ranks).run(train_compiled, compiled, ROWS, 30)[0]

    assert_same(found, expected, 1e-5 if "grouped" in kind else 1e-9)
    # The eager form of gpt-oss's experts, which float64 needs, asks which experts have tokens.
    assert all("aten.nonzero" in reason for reason in found["breaks"]) if kind == "sinks" else not found["breaks"]
    assert 0 < found["graphs"] <= most_graphs
    before, line, *again = found["printed"]
    assert [each.partition(" more")[0] for each in again] in ([], ["blocks: compiled once"])
    assert int(before.removeprefix("blocks: ").split()[0]) >= 2
    assert line.startswith("blocks: compiled in ")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "failing"), [(1, (0,)), (2, (0, 1)), (2, (0,)), (2, (1,))])
def test_blocks_that_do_not_compile_on_some_rank_run_uncompiled_on_all(
    pools: Any, tmp_path: Path, ranks: int, failing: tuple[int, ...]
) -> None:
    tree = settings(str(tiny_directory(tmp_path, "llama")))
    compiled = tree | {"parallel": BLOCKS}

    expected = pools(ranks).run(train, tree, ROWS, 3)[0]
    found = pools(ranks).run(train_compiled, compiled, ROWS, 3, failing)[0]

    assert_same(found, expected, 0.0)
    line = found["printed"][-1]
    assert line.startswith("blocks: not compiled, since the check before step 1 failed with them (")
    assert "no C++ compiler was found" in line


@pytest.mark.slow
def test_a_resume_in_another_form_says_so_in_a_line_for_the_blocks_and_one_for_the_head(
    pools: Any, tmp_path: Path
) -> None:
    def until(steps: int, compile_: str, chunk: int, folder: str = "forms") -> dict[str, Any]:
        head = {"head": {"chunk_tokens": chunk}}
        return tree(str(tmp_path / folder), steps=steps, parallel={"compile": compile_}, model=head)

    trees = [until(2, "blocks", 64), until(4, "off", 32), until(5, "off", 32)]
    printed = pools(1).run(runs_of_forms, trees)[0]
    pools(1).run(run, until(5, "off", 32, "straight"))

    order = "Sums are added up in another order, so numbers may differ by rounding"
    changes = [
        "note: the head runs by torch's operations, 32 tokens at a time; until step 2 it was torch's operations, "
        f"64 tokens at a time. {order}",
        f"note: blocks run eager; until step 2 they were compiled. {order}",
    ]
    assert printed == [[], changes, []]
    starts = [(start["blocks"], start["head"]["chunk_tokens"]) for start in events(tmp_path / "forms" / "r", "start")]
    assert starts == [("compiled", 64), ("eager", 32), ("eager", 32)]
    forms, straight = (read_metrics(tmp_path / folder / "r" / "metrics.jsonl") for folder in ("forms", "straight"))
    assert [line["loss"] for line in forms] == pytest.approx([line["loss"] for line in straight], rel=1e-5)
    assert [line["step"] for line in forms] == [1, 2, 3, 4, 5]
