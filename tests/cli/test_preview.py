"""`holdfast data preview`: one row as the model will see it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import in_a_terminal
from tests.cli.fixtures import write_rows, write_run
from tests.cli.in_process import cli_in_process
from tests.cli.screens import numbers
from tests.cli.warm import Done, WarmPython
from tests.messages import Said, lacks


def preview(folder: Path, *arguments: str) -> Done:
    return cli_in_process("data", "preview", "run.yaml", *arguments, cwd=folder)


def test_a_row_is_shown_as_tokens_with_their_number(tmp_path: Path, said: Said, tree: dict[str, Any]) -> None:
    write_run(tmp_path / "run.yaml", tree)

    done = preview(tmp_path, "--row", "3")

    assert done.err == ""
    assert done.code == 0
    sequence, counted = done.out.splitlines()
    assert sequence == "add 3=⟦3<eos>⟧"
    assert numbers(counted) == [8, 2]
    said(done.out)


def test_a_terminal_shows_what_is_trained_in_green_and_the_rest_dim(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    write_run(tmp_path / "run.yaml", tree)

    shown, code = in_a_terminal([warm.program, "-m", "holdfast.cli.main", "data", "preview", "run.yaml"], tmp_path)

    assert code == 0, shown
    sequence, counted = shown.splitlines()[:2]
    assert sequence == "\x1b[2madd 0=\x1b[0m\x1b[1;32m0<eos>\x1b[0m"
    assert "8 tokens, 2 trained (green)" in counted


def test_every_trained_stretch_is_marked(tmp_path: Path, tree: dict[str, Any]) -> None:
    turns = [("user", "a"), ("assistant", "bc"), ("user", "d"), ("assistant", "e")]
    write_rows(tmp_path / "rows.jsonl", [{"messages": [{"role": role, "content": text} for role, text in turns]}])
    template = "{% for m in messages %}{{ m.content }}{{ '=' if m.role == 'user' else eos_token }}{% endfor %}"
    tree["data"]["chat_template"] = template
    write_run(tmp_path / "run.yaml", tree)

    done = preview(tmp_path)

    assert done.code == 0, done.err
    sequence, counted = done.out.splitlines()
    assert sequence == "a=⟦bc<eos>⟧d=⟦e<eos>⟧"
    assert numbers(counted) == [9, 5]


def test_a_row_has_the_number_it_has_in_the_file_whatever_is_held_out(tmp_path: Path, tree: dict[str, Any]) -> None:
    tree["data"] |= {"validation_split": 0.5, "filter": "not_there.py:f"}
    write_run(tmp_path / "run.yaml", tree)

    shown = [preview(tmp_path, "--row", str(row)).out.splitlines()[0] for row in (0, 5, 11)]

    assert shown == ["add 0=⟦0<eos>⟧", "add 5=⟦5<eos>⟧", "add 11=⟦11<eos>⟧"]


def test_what_was_cut_is_counted(tmp_path: Path, said: Said, tree: dict[str, Any]) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "abc=", "completion": "defghij"}])
    write_run(tmp_path / "run.yaml", tree)

    split = preview(tmp_path, "data.max_length=5", "data.overlong=split")
    dropped = preview(tmp_path, "data.max_length=5", "data.overlong=drop")

    *parts, counted = split.out.splitlines()
    assert parts[::2] == ["abc=⟦d⟧", "e⟦fghi⟧", "j⟦<eos>⟧"]
    assert [numbers(line) for line in parts[1::2]] == [[5, 1], [5, 4], [2, 1]]
    assert counted == "split: 1"
    assert dropped.out.splitlines()[0] == "overlong_dropped: 1"
    said(split.out)
    said(dropped.out)


def test_a_row_that_is_not_there_is_refused(tmp_path: Path, said: Said, tree: dict[str, Any]) -> None:
    write_run(tmp_path / "run.yaml", tree)

    known = preview(tmp_path, "--row", "12")
    streamed = preview(tmp_path, "data.streaming=true", "--row", "12")

    assert (known.code, numbers(known.err)) == (2, [12, 0, 11])
    assert (streamed.code, numbers(streamed.err)) == (2, [12])
    said(known.err.strip())
    said(streamed.err.strip())


def test_a_prompt_is_shown_as_the_policy_sees_it(tmp_path: Path, said: Said, tree: dict[str, Any]) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"add {n}=", "answer": str(n)} for n in range(12)])
    policy = tree | {"reward": "exact", "rollout": {"max_new_tokens": 8}}
    write_run(tmp_path / "run.yaml", policy)

    done = preview(tmp_path, "--row", "7")

    assert done.code == 0, done.err
    prompt, counted, columns = done.out.splitlines()
    assert prompt == "add 7="
    assert numbers(counted) == [6, 8]
    assert columns.endswith(" answer, prompt")
    said(done.out)


def test_what_is_counted_on_a_prompt_is_told_in_true_sentences(
    tmp_path: Path, said: Said, tree: dict[str, Any]
) -> None:
    from holdfast.data.tasks.synthetic import character_tokenizer

    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    tree["model"]["tokenizer"] = "tokenizer"
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "add 7=", "answer": "7"}, {"prompt": "a" * 30, "answer": "7"}])
    write_run(tmp_path / "run.yaml", tree | {"reward": "exact", "rollout": {"max_new_tokens": 8}})

    short, long = (preview(tmp_path, "--row", row).out.splitlines() for row in "01")

    assert "chat template" in short[-1]
    assert not any("room" in line for line in short)
    (line,) = long
    assert numbers(line) == [30, 24]
    assert lacks(line, "rollout.max_new_tokens data.max_length") == []
    said(short[-1])
    said(line)


def test_a_file_for_another_verb_is_told_so(warm: WarmPython, tmp_path: Path, said: Said, tree: dict[str, Any]) -> None:
    write_run(tmp_path / "run.yaml", tree | {"reward": "exact", "rollout": {"group_size": 4}})

    done = warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", cwd=tmp_path)

    assert done.code == 2
    assert re.findall(r"`holdfast (.*?)`", done.err) == ["grpo", "grpo run.yaml", "sft"]
    said(done.err.strip())


@pytest.mark.parametrize(
    "option", ["reward=exact", "rollout.group_size=4", "preference.loss=dpo", "teacher.path=model"]
)
def test_an_option_for_another_verb_is_told_so(
    warm: WarmPython, tmp_path: Path, said: Said, tree: dict[str, Any], option: str
) -> None:
    write_run(tmp_path / "run.yaml", tree)
    meant = {"preference": "dpo", "teacher": "distill"}.get(option.partition(".")[0], "grpo")

    done = warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", option, cwd=tmp_path)

    assert done.code == 2
    assert re.findall(r"`holdfast (.*?)`", done.err)[:2] == [meant, f"{meant} run.yaml {option}"]
    said(done.err.strip())


def test_a_file_that_no_section_ascribes_to_a_verb_hears_what_is_missing_alone(
    warm: WarmPython, tmp_path: Path, said: Said, tree: dict[str, Any]
) -> None:
    write_run(tmp_path / "run.yaml", tree)

    done = warm.run("-m", "holdfast.cli.main", "dpo", "run.yaml", cwd=tmp_path)

    assert (done.code, done.err.count("\n")) == (2, 1)
    assert done.err.startswith("run.yaml: preference: ")
    said(done.err.strip())
