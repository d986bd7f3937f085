"""Every example does what its header says, on the ranks it asks for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
CLAIM = re.compile(r"(eval/\S+) (<=|>=) ([0-9.]+)")


def header(example: Path) -> str:
    lines = example.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if line.startswith("#"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_what_to_expect(example: Path) -> None:
    text = example.read_text(encoding="utf-8")

    assert len(text.splitlines()) <= 40
    assert f"examples/{example.name}" in header(example)
    assert CLAIM.search(header(example))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_reaches_the_numbers_in_its_header(example: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast.cli.main", "sft", str(example), f"run.dir={tmp_path}"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)

    assert done.returncode == 0, done.stderr
    assert "done after step" in done.stdout
    found = json.loads((tmp_path / example.stem / "metrics.jsonl").read_text().splitlines()[-1])
    for name, relation, bound in CLAIM.findall(header(example)):
        assert found[name] <= float(bound) if relation == "<=" else found[name] >= float(bound), name
