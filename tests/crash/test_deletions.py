"""Older checkpoints are gone when a run has ended, however long their deletion takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.warm import WarmPython
from tests.crash.killed import start
from tests.crash.runs import saved_steps

FILLS = """
from pathlib import Path

def fills_a_checkpoint_that_goes_with_the_last_save(event):
    if event.step == 7:
        folder = Path("r/checkpoints/step-00000004/more")
        folder.mkdir()
        for number in range(30_000):
            (folder / str(number)).touch()
"""


@pytest.mark.slow
def test_a_run_that_ends_leaves_no_half_deleted_checkpoint(warm: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text(FILLS)

    code, said = start(
        warm, tmp_path, None, "observers=[watch.py:fills_a_checkpoint_that_goes_with_the_last_save]", "launch.ranks=1"
    )

    assert code == 0, said
    assert saved_steps(tmp_path) == [6, 8]
    assert sorted(path.name for path in (tmp_path / "r" / "checkpoints").glob(".*")) == [".lease-00000001.json"]
