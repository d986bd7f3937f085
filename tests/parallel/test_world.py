"""What a rank knows of its place, read from the variables that launchers set."""

from __future__ import annotations

import os
import socket
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from holdfast.parallel.mesh import World, ranks_on
from tests.cli.warm import WarmPython

SCRIPT = """
from holdfast.config.sections.launch import LaunchConfig
from holdfast.parallel.mesh import joined_world
with joined_world(LaunchConfig(device="cpu")) as world:
    print("found", world.rank, world.size, world.local_rank, world.local_size)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return a program that says what place it took."""
    file = tmp_path / "place.py"
    file.write_text(SCRIPT)
    return file


@pytest.mark.cases("all")
@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, "found 0 1 0 1"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, "found 0 1 3 4"),
        ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_LOCALID": "2"}, "found 0 1 2 1"),
    ],
)
def test_a_rank_takes_its_place_from_the_environment(
    warm: WarmPython, script: Path, variables: dict[str, str], found: str
) -> None:
    done = subprocess.run(
        [warm.program, script], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )

    assert found in done.stdout, done.stderr


@pytest.mark.parametrize(("told", "found"), [({}, 2), ({"LOCAL_WORLD_SIZE": "1"}, 1)], ids=["nobody", "one"])
def test_ranks_that_no_launcher_counted_count_those_of_their_machine(
    warm: WarmPython, script: Path, told: dict[str, str], found: int
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    ranks = [
        subprocess.Popen(
            [warm.program, script],
            env={**os.environ, **shared, "RANK": str(rank), "SLURM_LOCALID": str(rank), **(told if rank == 0 else {})},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    words = sorted(rank.communicate(timeout=120)[0].strip() for rank in ranks)

    assert words == [f"found 0 2 0 {found}", "found 1 2 1 2"]


def on_two_machines(world: World, attempt: str) -> int:
    store = PrefixStore(attempt, _get_default_store())
    return ranks_on(store, "here" if world.rank != 1 else "there")


def test_ranks_of_other_machines_are_not_counted(pools: Any) -> None:
    assert pools(4).run(on_two_machines, uuid.uuid4().hex) == [3, 1, 3, 3]
