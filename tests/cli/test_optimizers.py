"""Optimizers by path from the command line: killed and resumed, and known by their file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.fixtures import write_run
from tests.cli.warm import WarmPython
from tests.messages import Said, lacks

OWN = Path(__file__).parents[1] / "optim" / "own.py"


@pytest.mark.parametrize(
    ("ranks", "path"),
    [
        pytest.param(2, "own.py:Factored", marks=pytest.mark.slow),
        pytest.param(2, "torch.optim:Adagrad", marks=pytest.mark.slow),
        pytest.param(1, "torch.optim:Adafactor", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any], ranks: int, path: str
) -> None:
    (tmp_path / "own.py").write_text(OWN.read_text(encoding="utf-8"), encoding="utf-8")
    tree |= {"optim": {"kind": "path", "path": path, "lr": 0.01}, "launch": {"ranks": ranks}}
    write_run(tmp_path / "run.yaml", tree)

    done = warm.run("-m", "holdfast.cli.main", "prove", "run.yaml", "--steps", "5", "--kill-at", "4", cwd=tmp_path)

    assert done.code == 0, done.err
    assert "killed: SIGKILL" in done.out
    assert done.out.splitlines()[-1] == "identical"


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_optimizer_file(
    warm: WarmPython, tmp_path: Path, said: Said, tree: dict[str, Any]
) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN.read_text(encoding="utf-8"), encoding="utf-8")
    tree |= {"optim": {"kind": "path", "path": "own.py:Momentum", "lr": 0.01, "schedule": "constant"}, "steps": 2}
    write_run(tmp_path / "run.yaml", tree)
    first = warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", cwd=tmp_path)
    own.write_text(own.read_text(encoding="utf-8") + "# changed\n", encoding="utf-8")

    second = warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", "steps=3", cwd=tmp_path)

    assert first.code == 0, first.err
    assert second.code == 2
    assert lacks(second.err, "optim.path own.py") == []
    said(second.err.strip())
