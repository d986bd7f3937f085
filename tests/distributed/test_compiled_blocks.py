"""Blocks that the compiler's front end took: the numbers of eager ones, and few programs, whatever the documents are.

Code of the compiler's back end runs in test_compile.py, which takes minutes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.metrics.sink import read_metrics
from holdfast.training.directory import events
from tests.distributed.cases import rows_of, settings, train
from tests.distributed.compile_cases import (
    errs,
    fails_after_the_check,
    runs_of_forms,
    train_as_on_a_card,
    train_compiled,
    waits,
)
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
        f"note: blocks: not compiled; before this start compiled. {order}",
        "note: the head runs by torch's operations, 32 tokens at a time; until step 2 it was torch's operations, "
        f"64 tokens at a time. {order}",
    ]
    assert printed == [[], changes, []]
    starts = [
        (start["forms"].get("blocks", 0), start["head"]["chunk_tokens"])
        for start in events(tmp_path / "forms" / "r", "start")
    ]
    assert starts == [(1, 64), (0, 32), (0, 32)]
    forms, straight = (read_metrics(tmp_path / folder / "r" / "metrics.jsonl") for folder in ("forms", "straight"))
    assert [line["loss"] for line in forms] == pytest.approx([line["loss"] for line in straight], rel=1e-5)
    assert [line["step"] for line in forms] == [1, 2, 3, 4, 5]


def test_a_compiler_that_fails_on_one_rank_in_a_step_is_an_event_and_a_column_and_the_run_ends_as_without(
    pools: Any, tmp_path: Path
) -> None:
    trees = [tree(str(tmp_path / name), steps=3, parallel={"compile": "blocks"}) for name in ("failing", "sound")]

    pools(2).run(fails_after_the_check, trees[0], (1,))
    pools(2).run(fails_after_the_check, trees[1], ())

    failing, sound = (read_metrics(tmp_path / name / "r" / "metrics.jsonl") for name in ("failing", "sound"))
    assert [line["loss"] for line in failing] == pytest.approx([line["loss"] for line in sound], rel=1e-5)
    assert [line.get("form/blocks") for line in failing] == [0.5, None, None]
    assert [line.get("form/blocks") for line in sound] == [1.0, None, None]
    chosen, *lost = events(tmp_path / "failing" / "r", "form")
    assert (chosen["form"], chosen["value"], chosen["step"]) == ("blocks", 1, 1)
    assert lost
    assert {(event["form"], event["value"], event["rank"], event["step"]) for event in lost} == {("blocks", 0, 1, 1)}
    assert "no C++ compiler was found" in lost[0]["reason"]
    assert len(list(events(tmp_path / "sound" / "r", "form"))) == 1


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_compiled_blocks_that_are_slower_are_left_and_leave_no_bit_behind(
    pools: Any, tmp_path: Path, ranks: int
) -> None:
    tree = settings(str(tiny_directory(tmp_path, "llama")))

    expected = pools(ranks).run(train, tree, ROWS, 3)[0]
    found = pools(ranks).run(train_as_on_a_card, tree, ROWS, 3, waits)[0]

    assert_same(found, expected, 0.0)
    line = found["printed"][-1]
    assert line.startswith("blocks: not compiled, since ")
    speedups = [float(number) for number in re.findall(r"\d+\.\d\d", line)]
    assert len(speedups) == 3
    assert min(speedups) < 1


def test_compiled_blocks_that_err_at_the_size_of_a_micro_batch_are_found_out(pools: Any, tmp_path: Path) -> None:
    tree = settings(str(tiny_directory(tmp_path, "llama")))

    expected = pools(1).run(train, tree, ROWS, 2)[0]
    found = pools(1).run(train_as_on_a_card, tree, ROWS, 2, errs)[0]

    assert_same(found, expected, 0.0)
    assert "losses of a micro-batch differ by" in found["printed"][-1]


def test_a_run_that_asks_for_compiled_blocks_has_them_as_soon_as_they_compile(pools: Any, tmp_path: Path) -> None:
    def until(steps: int) -> dict[str, Any]:
        return tree(str(tmp_path), steps=steps, parallel={"compile": "blocks"})

    printed = pools(1).run(runs_of_forms, [until(2), until(4), until(5)], (0,))[0]

    assert [len(lines) for lines in printed] == [0, 1, 0]
    lines = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert [line.get("form/blocks") for line in lines] == [0.0, None, 1.0, None, 1.0]
    for step, value in ((2, 0), (4, 1)):
        saved = tmp_path / "r" / "checkpoints" / f"step-0000000{step}" / "trainer.json"
        assert json.loads(saved.read_text())["state"]["forms"] == {"blocks": value}


def test_columns_of_forms_stand_in_the_next_line_that_is_written(pools: Any, tmp_path: Path) -> None:
    values = tree(str(tmp_path), steps=4, parallel={"compile": "blocks"}, metrics={"progress": "off", "log_every": 2})

    pools(1).run(runs_of_forms, [values])

    lines = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert [(line["step"], line.get("form/blocks")) for line in lines] == [(2, 1.0), (4, None)]


def test_a_run_that_was_compiled_by_key_and_one_that_is_from_now_on_say_so(pools: Any, tmp_path: Path) -> None:
    trees = [tree(str(tmp_path), steps=steps, parallel={"compile": key}) for steps, key in ((2, "off"), (4, "blocks"))]

    printed = pools(1).run(runs_of_forms, trees)[0]

    assert [len(lines) for lines in printed] == [0, 1]
    assert [start["forms"].get("blocks", 0) for start in events(tmp_path / "r", "start")] == [0, 1]
