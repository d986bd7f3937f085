"""The notebook runs from its first cell to its last, and the Dockerfile does what `make` needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    """The cells of code are run as a script, by this Python: a kernel would add nothing but its packages."""
    notebook = json.loads((ROOT / "examples" / "first_run.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join(cells), encoding="utf-8")

    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "60 steps, loss" in done.stdout
    first, last = next(line for line in done.stdout.splitlines() if line.startswith("loss "))[5:].split(" -> ")
    assert float(last) < float(first) / 2
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "outputs are not kept in the repository"


def test_the_image_installs_what_make_setup_reads() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = next(line for line in lines if line.startswith("COPY Makefile"))

    rule = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("$(VENV)/.installed:"))

    assert set(rule.partition(":")[2].split()) <= set(copied.split())
    assert all((ROOT / name).exists() for name in copied.split()[1:-1])
    assert lines[-1] == 'CMD ["make", "demo"]'
