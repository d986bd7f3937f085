"""The notebook with the pretrained model runs from its first cell to its last, and its numbers move as it says."""

from __future__ import annotations

from pathlib import Path

from tests.notebooks import run_cells


def curve(out: str, title: str) -> list[float]:
    """Return the numbers of a curve that the notebook prints."""
    rows = (line.split() for line in out.partition(f"{title}\n")[2].splitlines())
    numbers = []
    for row in rows:
        if not row or row[0] != str(len(numbers) + 1):
            break
        numbers.append(float(row[1]))
    return numbers


def test_the_notebook_trains_by_answers_and_then_by_rewards(room: Path) -> None:
    out = run_cells("smollm2.ipynb", room)

    losses, rewards = curve(out, "SFT: loss by step"), curve(out, "GRPO: mean reward by step")
    assert len(losses) == 8
    assert losses[-1] < losses[0] / 2
    assert len(rewards) == 8
    assert all(0 <= reward <= 1 for reward in rewards)
    assert "held-out reward 0." in out
    assert "Answer with the number alone." in out.splitlines()[-1]
