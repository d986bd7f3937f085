"""What a chat template does to rows is told: answers that stay open, roles it leaves out, rows that get too long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.data.tasks.synthetic import character_tokenizer
from tests.cli.fixtures import TINY, write_rows, write_run
from tests.cli.warm import Done, WarmPython

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
        "checkpoint": {"rehearsal": {"enabled": False}},
    }  # fmt: skip
    write_run(place / "run.yaml", tree)
    return warm.run("-m", "holdfast.cli.main", verb, "run.yaml", *options, cwd=place)


CASES = {
    "an answer that stays open": (OPEN, TOOL, "answers that the chat template does not close, so that a model does not "
                                  "learn to stop"),
    "a role that is left out": (CLOSED, TOOL, "rows with a tool's result that the chat template leaves out"),
}  # fmt: skip


@pytest.mark.parametrize(("template", "messages", "said"), CASES.values(), ids=CASES)
def test_doctor_and_the_run_say_what_a_template_does(
    warm: WarmPython, tmp_path: Path, template: str, messages: list[dict[str, str]], said: str
) -> None:
    rows = [{"messages": messages}] * 8

    looked = call(warm, tmp_path, "doctor", template, rows, "--only", "rows")
    trained = call(warm, tmp_path, "sft", template, rows)

    assert f"of the first 8 rows, 8 {said}" in looked.out
    assert "set data.chat_template to a template that does" in looked.out
    assert trained.code == 0, trained.err
    assert trained.out.count(f"warning: the first step has 4 {said}.") == 1


def test_a_template_that_does_what_is_expected_is_passed_over(warm: WarmPython, tmp_path: Path) -> None:
    rows = [{"messages": [TOOL[0], TOOL[2]]}] * 8

    looked = call(warm, tmp_path, "doctor", CLOSED, rows, "--only", "rows")
    trained = call(warm, tmp_path, "sft", CLOSED, rows)

    assert "template" not in looked.out
    assert trained.code == 0, trained.err
    assert "the first step has" not in trained.out


def test_rows_that_are_too_long_are_no_matter_of_the_batch(warm: WarmPython, tmp_path: Path) -> None:
    rows = [{"prompt": "add " + "1" * (2 if n < 2 else 40), "completion": "1"} for n in range(40)]

    done = call(warm, tmp_path, "sft", CLOSED, rows, "data.overlong=drop")

    assert done.code == 2
    assert done.err.splitlines()[-1] == (
        "Only 2 rows of rows are left to train on, less than one batch of 4: 38 left out as longer than "
        "data.max_length=32 has room for. Look at all with `holdfast data check RUN.yaml`; raise data.max_length, or "
        "change what data.overlong does."
    )
