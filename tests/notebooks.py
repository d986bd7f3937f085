"""Notebooks of examples/, run as scripts by this Python: a kernel would add nothing but its packages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_cells(name: str, folder: Path) -> str:
    """Run a notebook's cells of code in a folder, and return what they print.

    Raises:
        AssertionError: A cell fails, or the notebook keeps outputs.
    """
    cells = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells), "outputs are not kept in the repository"
    script = folder / "cells.py"
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    script.write_text("\n\n".join(code), encoding="utf-8")

    done = subprocess.run([sys.executable, str(script)], cwd=folder, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    return done.stdout
