"""`data.on_bad_row`: a row that cannot be read ends the run by name, or is left out and counted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.fixtures import write_run
from tests.cli.screens import numbers, saved_before_the_error
from tests.cli.warm import Done, WarmPython
from tests.messages import Said, lacks

GOOD = [{"prompt": f"add {n}=", "completion": str(n)} for n in range(20)]
TORN, NULL, LACKING = '{"prompt": "a', '{"prompt": "a=", "completion": null}', '{"prompt": "a="}'


def write_lines(path: Path, bad: dict[int, str]) -> None:
    """Write the good rows, with bad lines before the rows of these numbers."""
    lines = [line for n, row in enumerate(GOOD) for line in ([bad[n]] if n in bad else []) + [json.dumps(row)]]
    path.write_text("\n".join(lines) + "\n")


def train(warm: WarmPython, folder: Path, *arguments: str) -> Done:
    return warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", *arguments, cwd=folder)


def lines_of(folder: Path, name: str) -> list[dict[str, Any]]:
    written = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in written if "loss" in line]


@pytest.fixture
def unshuffled(tree: dict[str, Any]) -> dict[str, Any]:
    tree["data"] |= {"shuffle": False, "rows": "prompt_completion"}
    return tree | {"steps": 4, "optim": {"lr": 0.01, "schedule": "constant"}}


@pytest.mark.parametrize(("bad", "where"), [(NULL, "rows row 9"), (TORN, "rows.jsonl, line 10")])
def test_a_bad_row_in_the_middle_ends_the_run_with_its_row(
    bad: str, where: str, warm: WarmPython, tmp_path: Path, unshuffled: dict[str, Any], said: Said
) -> None:
    write_lines(tmp_path / "rows.jsonl", {9: bad})
    write_run(tmp_path / "run.yaml", unshuffled)

    done = train(warm, tmp_path)

    assert done.code == 2
    assert where in done.err
    assert "Traceback" not in done.err
    said(done.err.strip())


@pytest.mark.slow
def test_bad_rows_are_skipped_and_counted_and_train_what_the_good_ones_train(
    warm: WarmPython, tmp_path: Path, unshuffled: dict[str, Any]
) -> None:
    write_lines(tmp_path / "rows.jsonl", {0: TORN, 1: LACKING, 6: NULL, 9: TORN, 10: LACKING})
    write_lines(tmp_path / "good.jsonl", {})
    unshuffled["data"]["on_bad_row"] = "skip"
    write_run(tmp_path / "run.yaml", unshuffled)

    half = train(warm, tmp_path, "run.name=both", "steps=2")
    rest = train(warm, tmp_path, "run.name=both")
    good = train(warm, tmp_path, "run.name=good", "data.path=good.jsonl")

    assert (half.code, rest.code, good.code) == (0, 0, 0), half.err + rest.err + good.err
    skipped, plain = lines_of(tmp_path, "both"), lines_of(tmp_path, "good")
    assert [line["loss"] for line in skipped] == [line["loss"] for line in plain]
    assert [line.get("data/bad_rows", 0) for line in skipped] == [2, 1, 2, 0]
    assert [line["data/rows"] for line in skipped] == [4, 4, 4, 4]
    assert told_of(half.out) == ([0, 2, 8], 3)
    assert told_of(rest.out) == ([12, 14], 2)


def told_of(out: str) -> tuple[list[int], int]:
    """Return the bad rows that warnings name, and how many the last line of them counts."""
    named = re.findall(r"^warning: .*?\brow (\d+)", out, re.MULTILINE)
    (counted,) = re.findall(r"(\d+) .*\(data/bad_rows\)", out)
    return [int(row) for row in named], int(counted)


def test_rows_that_are_all_bad_are_refused_with_the_first_reason(
    warm: WarmPython, tmp_path: Path, unshuffled: dict[str, Any], said: Said
) -> None:
    (tmp_path / "rows.jsonl").write_text((LACKING + "\n") * 12)
    unshuffled["data"]["on_bad_row"] = "skip"
    write_run(tmp_path / "run.yaml", unshuffled)

    done = train(warm, tmp_path)

    assert done.code == 2
    assert lacks(done.err, "rows bad_rows: 12") == []
    assert "rows row 0: " in done.err
    said(done.err.strip())
    assert not (tmp_path / "runs").exists()


HANGS = """
import time

def take(row):
    while row["prompt"] == "add 13=":
        time.sleep(1)
    return True
"""


@pytest.mark.slow
def test_a_filter_that_hangs_is_named_and_the_last_whole_step_is_saved(  # two starts, and a wait of three seconds
    warm: WarmPython, tmp_path: Path, unshuffled: dict[str, Any]
) -> None:
    write_lines(tmp_path / "rows.jsonl", {})
    (tmp_path / "hangs.py").write_text(HANGS)
    unshuffled["data"]["filter"] = "hangs.py:take"
    write_run(tmp_path / "run.yaml", unshuffled)

    hung = train(warm, tmp_path, "run.name=hung", "launch.timeout_minutes=0.05")
    (tmp_path / "hangs.py").write_text("def take(row):\n    return True\n")
    rest = train(warm, tmp_path, "run.name=hung", "checkpoint.resume.changed=[data, files]")
    straight = train(warm, tmp_path, "run.name=straight")

    assert hung.code == 3, hung.err
    assert "(launch.timeout_minutes)" in hung.err
    assert numbers(hung.err)[:4] == [4, 0.05, 1, 13]  # step, minutes, rank and row
    assert saved_before_the_error(hung.out) == 3
    assert (rest.code, straight.code) == (0, 0), rest.err + straight.err
    losses = [[line["loss"] for line in lines_of(tmp_path, name)] for name in ("hung", "straight")]
    assert losses[0] == losses[1]
