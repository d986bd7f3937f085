"""What a save leaves is a plain directory of torch's distributed checkpoints: anybody's loader reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, load

from holdfast import checkpoint
from holdfast.checkpoint.place.hashing import hash_tensor
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build, contents, optimizer_of, step


def save(world: World, path: str) -> dict[str, Any]:
    """Train and save; return parameters, whole, and whether torch.save writes checksums again."""
    toy = build(world)
    optimizer = optimizer_of(toy)
    for number in range(2):
        step(world, toy, optimizer, number)
    checkpoint.save(path, toy, optimizer)
    return {"contents": contents(toy, optimizer)}


def read(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill tensors with torch's own loader and its own reader of files."""
    load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one process is meant
def test_torch_s_own_loader_reads_every_tensor(pools: Any, tmp_path: Path) -> None:
    saved = pools(2).run(save, str(tmp_path / "step-2"))[0]
    manifest = checkpoint.verify(str(tmp_path / "step-2"))
    tensors = {
        name: torch.full(entry.shape, -7, dtype=getattr(torch, entry.dtype)) for name, entry in manifest.tensors.items()
    }

    read(tensors, tmp_path / "step-2" / "tensors")

    found = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        parameter, _, slot = rest.rpartition(".")
        found[rest if kind == "model" else f"{parameter}/{slot}"] = hash_tensor(tensor)
    assert found == {name: described[0] for name, described in saved["contents"].items()}
    assert len(found) > 20
