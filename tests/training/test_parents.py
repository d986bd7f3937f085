"""What a run records of what it starts from."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from holdfast.parallel.mesh import World
from tests.tiny import tiny_directory
from tests.training.cases import run, tree


def run_in(world: World, values: dict[str, Any], folder: str) -> None:
    with contextlib.chdir(folder):
        run(world, values)


def test_no_password_of_an_address_is_recorded(pools: Any, tmp_path: Path) -> None:
    address, first_place = "https://me:planted@host/model", "me:planted@host"
    tiny_directory(tmp_path / address, "llama")
    first, second = (tree(place, steps=1) | {"model": {"path": address}} for place in (first_place, "runs"))
    first["checkpoint"]["every_steps"] = second["checkpoint"]["every_steps"] = 1
    second["checkpoint"]["init_from"] = f"file://{first_place}/r/checkpoints/step-00000001"
    for values in (first, second):
        pools(1).run(run_in, values, str(tmp_path))

    place = tmp_path / "runs/r"

    parent = json.loads((place / "run.json").read_text())["parent"]
    assert (parent["model"], parent["init_from"]) == ("https://host/model", "file://host/r/checkpoints/step-00000001")
    files = [file for file in place.rglob("*") if file.is_file() and file.name != "config.resolved.yaml"]
    assert len(files) > 10
    assert [file.relative_to(place) for file in files if b"planted" in file.read_bytes()] == []
