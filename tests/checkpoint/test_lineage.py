"""What a manifest of a loop of the user's own says of where it comes from."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy

from holdfast import checkpoint
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build


def save_three(world: World, directory: str) -> list[Manifest]:
    """Save two steps in line, the second from what was loaded, and one that names no other."""
    toy = build(world)
    first = checkpoint.save(f"{directory}/step-00000003", toy)
    found = checkpoint.load(f"{directory}/step-00000003", toy)
    second = checkpoint.save(f"{directory}/step-00000005", toy, parent=found.manifest)
    alone = checkpoint.save(f"{directory}/step-00000007", toy)
    return [first, second, alone]


def test_a_save_records_the_versions_and_the_checkpoint_it_continues_from(pools: Any, tmp_path: Path) -> None:
    first, second, alone = pools(2).run(save_three, str(tmp_path))[0]

    stored = [checkpoint.verify(str(tmp_path / f"step-0000000{step}")) for step in (3, 5, 7)]
    assert stored == [first, second, alone]
    assert [(each.parent, each.parent_step) for each in stored] == [(None, None), (first.hash, 3), (None, None)]
    assert stored[0].versions["python"] == platform.python_version()
    assert stored[0].versions["torch"] == version("torch")
    assert stored[0].versions["numpy"] == numpy.__version__
