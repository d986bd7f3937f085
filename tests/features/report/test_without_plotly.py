"""Without plotly a run ends as it does with it, and what would draw names the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.fixtures import write_run

PIP = "pip install 'holdfast[report]'"


@pytest.mark.slow
def test_a_run_without_plotly_goes_on_without_its_page_and_says_how_to_get_it(
    tmp_path: Path, tree: dict[str, Any]
) -> None:
    """Two processes of their own, which import torch: a warm one has imported what it needs already."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text("import sys\n\nsys.modules['plotly'] = None\n")
    write_run(tmp_path / "run.yaml", tree)
    paths = [str(tmp_path / "blocked"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def holdfast(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "holdfast.cli.main", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    run = holdfast("sft", "run.yaml")
    page = holdfast("report", "runs/run")

    assert run.returncode == 0, run.stderr
    assert run.stderr.count(PIP) == 1
    assert "on one page" not in run.stdout
    assert page.returncode == 2
    assert page.stderr.count(PIP) == 1
    assert "Traceback" not in run.stderr + page.stderr
    assert not list(tmp_path.rglob("report.html"))
