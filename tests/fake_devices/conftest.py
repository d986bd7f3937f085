"""The lane: one process for each place, which executes all runs as that rank."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.fake_devices.cases import PLACES
from tests.fake_devices.lane import make_models

ROOT = Path(__file__).parents[2]


def needs_guard() -> None:
    """Leave a test out where nothing can be executed."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler: the guard of fake devices cannot be built")


def child(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module of ours in a process that has not imported torch."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])  # the tree that this test stands in, whatever is installed
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)


def executed(folder: Path, ranks: int, rank: int, *names: str) -> dict[str, dict[str, Any]]:
    """Execute runs as one rank; return what each said, by name."""
    done = child("tests.fake_devices.lane", str(folder), str(ranks), str(rank), *names)
    lines = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("lane ")]
    assert done.returncode == 0, done.stderr[-3000:]
    return {line["run"]: line for line in lines}


Lane = dict[tuple[int, int], dict[str, dict[str, Any]]]


@pytest.fixture(scope="session")
def lane(tmp_path_factory: pytest.TempPathFactory) -> Lane:
    """What every run said, by place."""
    needs_guard()
    folder = tmp_path_factory.mktemp("lane")
    make_models(folder)
    with ThreadPoolExecutor(len(PLACES)) as pool:  # all at once: the last one alone would leave a core without work
        return dict(zip(PLACES, pool.map(lambda place: executed(folder, *place), PLACES), strict=True))
