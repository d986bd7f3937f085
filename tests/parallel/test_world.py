"""What a rank knows of its place, read from the variables that launchers set."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
from holdfast.config.launch import LaunchConfig
from holdfast.parallel.mesh import joined
with joined(LaunchConfig(device="cpu")) as world:
    print("found", world.rank, world.size, world.local_rank, world.local_size)
"""


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, "found 0 1 0 None"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, "found 0 1 3 4"),
        ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_LOCALID": "2"}, "found 0 1 2 None"),
    ],
)
def test_a_rank_takes_its_place_from_the_environment(variables: dict[str, str], found: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )

    assert found in done.stdout, done.stderr
