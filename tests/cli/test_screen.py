"""What a run shows: a bar on a terminal, lines elsewhere; and that both say what metrics.jsonl holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.metrics.sink import read_metrics
from tests.cli.commands import in_a_terminal
from tests.cli.fixtures import write_run
from tests.cli.screens import ended, page_of
from tests.cli.warm import WarmPython

COMMAND = ("-m", "holdfast.cli.main", "sft", "run.yaml")


@pytest.fixture
def forty_steps(tmp_path: Path, tree: dict[str, Any]) -> dict[str, Any]:
    (tmp_path / "slow.py").write_text("import time\n\ndef step(event):\n    time.sleep(0.05)\n")
    return tree | {
        "steps": 40,
        "observers": ["slow.py:step"],
        "checkpoint": {"rehearsal": False},
        "metrics": {"peak_flops": 1e9},
    }


@pytest.mark.slow
def test_a_terminal_shows_a_bar_with_steps_loss_tokens_per_second_and_the_time_left(
    warm: WarmPython, tmp_path: Path, forty_steps: dict[str, Any]
) -> None:
    write_run(tmp_path / "run.yaml", forty_steps)

    shown, code = in_a_terminal([warm.program, *COMMAND], tmp_path)

    assert code == 0, shown
    lines = read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")
    assert len(lines) == 40
    frames = re.split(r"\r|\n", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))
    bars = [frame for frame in frames if re.match(r"step +\d+/40 ", frame)]
    of_step = {int(re.findall(r"\d+", frame)[0]): frame for frame in bars}
    assert len(of_step) > 3
    for step, frame in of_step.items():
        if step == 0:
            continue
        line = lines[step - 1]
        assert f"loss {line['loss']:.4f}" in frame
        shown_numbers = re.sub(" +", " ", frame)
        assert f"tok/s {line['throughput/tokens_per_second']:,.0f} mfu {line['throughput/mfu']:.1%} " in shown_numbers
        assert re.search(r"\d:\d\d:\d\d left (-|\d):(-|\d)", frame), frame
    known = [frame for step, frame in of_step.items() if 0 < step < 40 and re.search(r"left 0:00:0[0-9]", frame)]
    assert known, bars  # an estimate, of seconds and not of minutes
    assert "\x1b[?25l" in shown  # the cursor is hidden while the bar is drawn,
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # and comes back
    closing = shown.rstrip().splitlines()[-2]
    assert re.findall(r"runs/run[\w/]*", closing) == ["runs/run", "runs/run/exports/final"]


@pytest.mark.slow
def test_without_a_terminal_there_are_plain_lines_of_steps(
    warm: WarmPython, tmp_path: Path, forty_steps: dict[str, Any]
) -> None:
    write_run(tmp_path / "run.yaml", forty_steps)

    done = warm.run(*COMMAND, cwd=tmp_path)

    assert done.code == 0, done.err
    assert "\x1b" not in done.out
    assert "\r" not in done.out
    lines = read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")
    shown = [
        re.match(r"step (\d+)/40  loss ([\d.]+)  .*  tok/s ([\d,]+)  mfu ([\d.]+%)(?:  left (0:00:\d\d))?$", line)
        for line in done.out.splitlines()
    ]
    steps = {int(match.group(1)): match for match in shown if match}
    assert min(steps) == 1
    assert max(steps) == 40
    assert len(steps) < 20  # one a second, and the last
    for step, match in steps.items():
        assert match.group(2) == f"{lines[step - 1]['loss']:.4f}"
        assert match.group(3) == f"{lines[step - 1]['throughput/tokens_per_second']:,.0f}"
        assert match.group(4) == f"{lines[step - 1]['throughput/mfu']:.1%}"
        assert (match.group(5) is None) == (step in {1, 40}), "an estimate from the second step on, none at the end"


def test_progress_off_prints_no_step(warm: WarmPython, tmp_path: Path, tree: dict[str, Any]) -> None:
    write_run(tmp_path / "run.yaml", tree | {"metrics": {"progress": "off"}})

    done = warm.run(*COMMAND, cwd=tmp_path)

    assert done.code == 0, done.err
    assert not re.search(r"^step ", done.out, re.MULTILINE)
    assert ended(done.out.splitlines()[-2]) == ("done", 2, "runs/run")
    assert page_of(done.out) == "runs/run/report.html"
