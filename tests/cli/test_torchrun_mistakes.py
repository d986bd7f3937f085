"""A mistake under torchrun is one paragraph of the first rank and exit code 2, whoever met it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.fixtures import write_run
from tests.cli.warm import WarmPython, run

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2"]
SCRIPT = """
import json
import os
import time

import holdfast

if os.environ["RANK"] == "0":
    time.sleep(1)  # the rank that speaks may well be the last
holdfast.sft(json.load(open("tree.json")))
"""
BEFORE = "optim.lrr: "
AFTER = "data.path=nix.jsonl "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "named"),
    [(["optim.lrr=1"], f"command line (optim.lrr=1): {BEFORE}"), (["data.path=nix.jsonl"], AFTER)],
)
def test_the_command_tells_it_once(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any], words: list[str], named: str
) -> None:
    write_run(tmp_path / "run.yaml", tree)

    done = run([*TORCHRUN, warm.program, "-m", "holdfast.cli.main", "sft", "run.yaml", *words], cwd=tmp_path)

    _check(done.err, named)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("changed", "named"), [({"optim": {"lrr": 1}}, BEFORE), ({}, AFTER)])
def test_a_script_tells_it_once(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any], changed: dict[str, Any], named: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "tree.json").write_text(json.dumps(tree | {"data": {"path": "nix.jsonl"}} | changed))

    done = run([*TORCHRUN, warm.program, "script.py"], cwd=tmp_path)

    _check(done.err, named)


def _check(err: str, named: str) -> None:
    ours, torchruns = re.split(r"^[WE]\d{4} ", err, maxsplit=1, flags=re.MULTILINE)
    assert named in ours
    assert ours.count("\n") == 1
    assert ours.strip() not in torchruns
    assert re.search(r"rank      : 0 \(local_rank: 0\)\s+exitcode  : 2 ", torchruns)
    assert "holdfast.errors" not in err
