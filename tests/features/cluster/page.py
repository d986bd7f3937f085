"""The commands that docs/machines.md shows, by heading, for the tests that run them as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "machines.md"
RUN_BY = {
    "A batch job": "tests/features/cluster/test_slurm.py",
    "Inside an allocation": "tests/features/cluster/test_slurm.py",
    "Without a scheduler": "tests/features/cluster/test_hosts.py",
    "Ray": "tests/features/cluster/test_ray.py",
}
"""Heading to the file with the test that runs its commands."""
WITH_PROGRAMS = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
"""Lets a shell find `holdfast` and the Python that the tests run in."""


def headings() -> list[str]:
    """Return the headings below which the page shows commands."""
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [section.partition("\n")[0] for section in sections if "```bash" in section]


def commands(heading: str) -> list[str]:
    """Return the command lines below a heading, without comments."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, flags=re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def write_run(folder: Path, example: Path, values: Sequence[str], python: str = sys.executable) -> None:
    """Write run.yaml into a folder: an example with other values."""
    folder.mkdir(exist_ok=True)
    command = [python, "-m", "holdfast.cli.main", "config", "show", str(example), *values]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout
    (folder / "run.yaml").write_text(shown)
