"""What people meet first in Python: short answers, no talk of other packages, and errors of ours."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import UserError
from tests.cli.fixtures import of_step, write_rows
from tests.cli.warm import run

SCRIPT = """
import sys

import holdfast

print(repr(holdfast.checkpoint.verify(sys.argv[1])))
holdfast.sft  # which imports what trains
import bitsandbytes, torchao  # as transformers and peft do somewhere
"""


@pytest.mark.slow
def test_a_script_sees_a_short_manifest_and_no_talk_of_other_packages(trained: Path) -> None:
    done = run([sys.executable, "-c", SCRIPT, of_step(2)], cwd=trained)

    assert (done.code, done.err) == (0, "")
    shown = (
        r"<Manifest of step 2 of run [0-9a-f]{8}: model, optimizer, trainer, rank; \d+ tensors, \d+ files, [\d.]+ KiB>"
    )
    assert re.fullmatch(shown + "\n", done.out)


@pytest.mark.parametrize("place", ["file/runs", "n" * 300, "/proc/nowhere"])
def test_a_run_dir_that_cannot_be_made_is_a_users_error(tmp_path: Path, tree: dict[str, Any], place: str) -> None:
    (tmp_path / "file").write_text("")
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}] * 4)
    changed = {"run": {"dir": str(tmp_path / place), "name": "r"}, "launch": {"device": "cpu"}}
    changed["data"] = tree["data"] | {"path": str(tmp_path / "rows.jsonl")}

    with pytest.raises(UserError, match=r"^run\.dir=.*"):
        holdfast.sft(tree | changed)


def test_commands_say_nothing_of_other_packages(trained: Path, tmp_path: Path) -> None:
    """In processes of their own: what other packages say when they are imported is said once in a process."""
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, [{"prompt": "add 1=", "completion": "1"}] * 40)
    model = trained / "runs" / "run" / "exports" / "final"
    file = str(tmp_path / "first.yaml")
    commands = [
        ["--help"],
        ["init", "--model", str(model), "--data", str(rows), "--output", file],
        # Not `run`: the dry run is a command of its own below.
        [
            *("doctor", file, "launch.device=cpu", "launch.ranks=1"),
            *(f"--only={check}" for check in ("versions", "configuration", "compilers", "place", "plan")),
        ],
        ["plan", file, "launch.device=cpu", "launch.ranks=1"],
        ["sft", file, "dry_run=true", "launch.device=cpu", "launch.ranks=1"],
    ]

    for command in commands:
        done = run([sys.executable, "-m", "holdfast.cli.main", *command], cwd=tmp_path)

        others = [line for line in done.err.splitlines() if not line.startswith(("looking at ", "plan: "))]
        assert (done.code, others) == (0, []), command
