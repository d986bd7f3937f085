"""The mark of weights files knows every byte."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from holdfast.config.load import from_mapping
from holdfast.config.sections.model import LoRAConfig
from holdfast.config.verbs.training import SFTConfig
from holdfast.errors import ModelError
from holdfast.models.adapters.files import AdapterFile, check_base
from holdfast.models.files.origin import files_fingerprint
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from holdfast.training.fingerprints import fingerprint_once

MIB = 2**20


def written(directory: Path, size: int = 3 * MIB) -> Path:
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(bytes(range(251)) * (size // 251))
    return directory


def change(directory: Path, place: int) -> None:
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(place)
        file.write(b"\xff")


@pytest.mark.parametrize("place", [0, 3 * MIB // 2, 3 * MIB - 300])
def test_one_changed_byte_anywhere_changes_the_mark(tmp_path: Path, place: int) -> None:
    directory = written(tmp_path / "a")
    before = files_fingerprint(directory)

    change(directory, place)

    assert files_fingerprint(directory) != before
    assert files_fingerprint(written(tmp_path / "b")) == before


def adapter_beside(place: Path, mark: str) -> AdapterFile:
    place.mkdir()
    save_file({"x": torch.zeros(1)}, place / "adapter_model.safetensors", {"holdfast_base": mark})
    return AdapterFile.at(place)


def test_adapters_are_refused_beside_a_base_that_differs_inside(tmp_path: Path) -> None:
    directory = written(tmp_path / "a")
    stored = adapter_beside(tmp_path / "adapter", files_fingerprint(directory))
    section = LoRAConfig(path="adapter")
    check_base(directory, stored, section)

    change(directory, 3 * MIB // 2)

    with pytest.raises(ModelError, match=r"the mark of their files is (\w{12}), here it is (?!\1)\w{12}\."):
        check_base(directory, stored, section)


def bytes_read(world: World, directory: str) -> tuple[int, str]:
    """Return what this rank read from files for the mark, by the system's count, and the mark."""
    tree = {"steps": 1, "model": {"path": directory}, "data": {"path": "rows"}}
    ranks = RankGroup(from_mapping(tree, SFTConfig).launch.timeout_minutes)
    before = _read()
    fingerprint_once(Path(directory), ranks)
    mark = files_fingerprint(Path(directory))
    return _read() - before, mark


def _read() -> int:
    told = Path(f"/proc/{os.getpid()}/io").read_text()
    return int(told.split("rchar:")[1].split()[0])


def test_one_rank_reads_the_files_and_tells_the_others(pools: Any, tmp_path: Path) -> None:
    directory = written(tmp_path / "a", size=40 * MIB)

    (first, mark), (second, same) = pools(2).run(bytes_read, str(directory))

    assert mark == same == files_fingerprint(directory)
    assert 40 * MIB < first < 50 * MIB
    assert second < 10 * MIB
