"""What a chat template does to rows is told: answers that stay open, roles it leaves out, rows that get too long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.data.tasks.synthetic import character_tokenizer
from tests.cli.fixtures import TINY, write_rows, write_run
from tests.cli.screens import numbers
from tests.cli.warm import Done, WarmPython
from tests.messages import Said, lacks

ASKED = "{% if add_generation_prompt %}a {% endif %}"
OPEN = "{% for m in messages %}{{ m.role[0] }} {{ m.content }}{% endfor %}" + ASKED
CLOSED = "{% for m in messages if m.role != 'tool' %}{{ m.role[0] }} {{ m.content }}{{ eos_token }}{% endfor %}" + ASKED
TOOL = [{"role": "user", "content": "sum"}, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "4"}]


def call(warm: WarmPython, place: Path, verb: str, template: str, rows: list[dict[str, Any]], *options: str) -> Done:
    """Run a command on a run of two steps of a model whose tokenizer has this template."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(place / "tokenizer")
    write_rows(place / "rows.jsonl", rows)
    tree = {
        "steps": 2, "model": {"config": dict(TINY), "tokenizer": "tokenizer"}, "launch": {"ranks": 1, "device": "cpu"},
        "data": {"path": "rows.jsonl", "batch_size": 4, "max_length": 32},
        "checkpoint": {"rehearsal": False},
    }  # fmt: skip
    write_run(place / "run.yaml", tree)
    return warm.run("-m", "holdfast.cli.main", verb, "run.yaml", *options, cwd=place)


CASES = {"an answer that stays open": (OPEN, "answers"), "a role that is left out": (CLOSED, "tool's result")}


@pytest.mark.parametrize(("template", "named"), CASES.values(), ids=CASES)
def test_a_run_says_what_a_template_does(
    warm: WarmPython, tmp_path: Path, said: Said, template: str, named: str
) -> None:
    rows = [{"messages": TOOL}] * 8

    trained = call(warm, tmp_path, "sft", template, rows)

    assert trained.code == 0, trained.err
    (warning,) = [line for line in trained.out.splitlines() if line.startswith("warning: ") and "template" in line]
    assert lacks(warning, named) == []
    assert numbers(warning) == [4]
    said(warning)


def test_a_template_that_does_what_is_expected_is_passed_over(warm: WarmPython, tmp_path: Path) -> None:
    rows = [{"messages": [TOOL[0], TOOL[2]]}] * 8

    trained = call(warm, tmp_path, "sft", CLOSED, rows)

    assert trained.code == 0, trained.err
    assert "template" not in trained.out


def test_rows_that_are_too_long_are_no_matter_of_the_batch(warm: WarmPython, tmp_path: Path, said: Said) -> None:
    rows = [{"prompt": "add " + "1" * (2 if n < 2 else 40), "completion": "1"} for n in range(40)]

    done = call(warm, tmp_path, "sft", CLOSED, rows, "data.overlong=drop")

    assert done.code == 2
    last = done.err.splitlines()[-1]
    assert numbers(last) == [2, 4, 38]
    assert lacks(last, "data.max_length=32 data.overlong") == []
    said(last)
