"""A run on terminals of three widths: the step, the time left and what the verb is judged by stand on one row."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.metrics.sink import read_metrics
from tests.cli.commands import in_a_terminal
from tests.cli.fixtures import write_rows, write_run
from tests.cli.warm import WarmPython
from tests.screen import Screen
from tests.tiny import tiny_directory

STEPS = 12
PAIRS = [{"prompt": f"add {n}=", "chosen": str(n), "rejected": "no"} for n in range(12)]
REWARD = """
def even(completion):
    return {"reward": float(len(completion)), "words": 0.5, "length": float(len(completion))}
"""
SECTIONS: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {"preference": {"loss": "dpo"}},
    "reward": {"preference": {"loss": "bradley_terry"}},
    "distill": {"teacher": {"path": "teacher"}},
    "grpo": {
        "reward": {"path": "rewards.py:even"},
        "rollout": {"group_size": 2, "max_new_tokens": 6, "show_every": 6},
    },
}
MAIN = {
    "sft": [("loss", "loss", 4), ("accuracy", "mean_token_accuracy", 3)],
    "dpo": [("margin", "rewards/margins", 3), ("accuracy", "rewards/accuracies", 3)],
    "reward": [("loss", "loss", 4), ("accuracy", "rewards/accuracies", 3)],
    "distill": [("loss", "loss", 4), ("divergence", "divergence", 4)],
    "grpo": [("reward", "reward", 3), ("length", "completions/mean_length", 0)],
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("verb", list(SECTIONS))
@pytest.mark.parametrize("columns", [80, 100, 140])
def test_one_row_shows_the_step_the_time_left_and_two_numbers(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any], columns: int, verb: str
) -> None:
    (tmp_path / "slow.py").write_text("import time\n\ndef step(event):\n    time.sleep(0.15)\n")
    (tmp_path / "rewards.py").write_text(REWARD)
    if verb in {"dpo", "reward"}:
        write_rows(tmp_path / "rows.jsonl", PAIRS)
    if verb == "distill":
        tiny_directory(tmp_path / "teacher", "llama", vocab_size=64)
    changed = {"steps": STEPS, "observers": ["slow.py:step"], "checkpoint": {"rehearsal": False}}
    write_run(tmp_path / "run.yaml", tree | changed | {"launch": {"ranks": 1, "device": "cpu"}} | SECTIONS[verb])
    screen = Screen(columns)

    shown, code = in_a_terminal([warm.program, "-m", "holdfast.cli.main", verb, "run.yaml"], tmp_path, columns)

    assert code == 0, shown
    screen.feed(shown)
    lines = read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")
    drawn = [row for row in screen.drawn if row.startswith("step ")]
    steps = [int(re.findall(r"\d+", row)[0]) for row in drawn]
    assert len(set(steps)) > 3
    for step, row in zip(steps, drawn, strict=True):
        assert re.match(rf"step +{step}/{STEPS} [━╸╺]+ ", row)
        assert re.search(r" left (0:00:\d\d|-:--:--)$", row)
        for label, name, digits in MAIN[verb] if step else ():
            assert f"  {label} {lines[step - 1][name]:.{digits}f} " in row
    longest = max(drawn, key=len)
    assert columns - 26 < len(longest) <= columns
    assert ("tok/s" in longest) == (columns > 80 or MAIN[verb][0][0] == "loss")  # behind the loss
    if columns != 100:  # there it depends on how many digits the tokens per second have
        assert ("norm" in longest) == (columns == 140)
    # Nothing of a row that was drawn in place stays behind but the last one.
    left = [row for row in screen.rows if row.startswith(f"step {STEPS}/{STEPS} ")]
    assert len(left) == 1
    assert not [row for row in screen.rows if "left" in row and row not in left]
    _check_log(tmp_path / "runs" / "run" / "logs" / "rank-0.log", lines, screen, policy=verb == "grpo")


def _check_log(path: Path, lines: list[dict[str, Any]], screen: Screen, *, policy: bool) -> None:
    """Look for whole lines of steps in the log, and for every message as one line."""
    log = path.read_text()
    steps = re.findall(r"^step (\d+)/12  loss (\S+)  .*  norm \S+  lr \S+  tok/s [\d,]+(?:  left \S+)?$", log, re.M)
    assert int(steps[0][0]) == 1
    assert int(steps[-1][0]) == STEPS
    assert all(loss == f"{lines[int(step) - 1]['loss']:.4f}" for step, loss in steps)
    told = next(line for line in log.splitlines() if line.startswith("checked against transformers"))
    assert len(told) > 140  # it is longer than each of the terminals is wide
    place = next(number for number, row in enumerate(screen.rows) if row.startswith("checked against transformers"))
    assert told.startswith(screen.rows[place] + screen.rows[place + 1][:10])
    if policy:  # columns that leave no room for the texts of a narrow terminal are counted
        columns = "even  even/words  even/length" if screen.columns > 80 else r"even  even/words  \(and 1 more\)"
        assert re.search(rf"^completions of step 6:\n +reward  advantage  {columns}\n +best +\S+ +[+-]", log, re.M)
