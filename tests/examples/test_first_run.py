"""The notebook runs from its first cell to its last, and the Dockerfile does what `make` needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks import run_cells

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    out = run_cells("first_run.ipynb", tmp_path)

    assert "60 steps, loss" in out
    first, last = next(line for line in out.splitlines() if line.startswith("loss "))[5:].split(" -> ")
    assert float(last) < float(first) / 2


def test_the_image_installs_what_make_setup_reads() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = next(line for line in lines if line.startswith("COPY Makefile"))

    rule = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("$(VENV)/.installed:"))

    assert set(rule.partition(":")[2].split()) <= set(copied.split())
    assert all((ROOT / name).exists() for name in copied.split()[1:-1])
    assert lines[-1] == 'CMD ["make", "demo"]'
