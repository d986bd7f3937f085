"""Checkpoints of format 2: the one in an archive of tests/earlier, and others of any tensors, by torch's DCP."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor

from holdfast.checkpoint.format.manifest import NAME, Chunk, Manifest, TensorEntry
from holdfast.checkpoint.place.hashing import hash_bytes, hash_file, hash_tensor
from tests.archives import unpack

ARCHIVE = Path(__file__).parents[2] / "earlier" / "sft-0.1.0.tar.xz"
STEP_2 = "step-00000002"


def run_of_format_2(place: Path) -> Path:
    """Return the directory of a run with a checkpoint of step 2, which two ranks saved."""
    return unpack(ARCHIVE, place) / "run"


def body_of(checkpoint: Path) -> dict[str, Any]:
    """Return a manifest without its envelope."""
    body: dict[str, Any] = json.loads((checkpoint / NAME).read_bytes())["manifest"]
    return body


def rewritten(checkpoint: Path, change: Callable[[dict[str, Any]], Any] = lambda body: body) -> str:
    """Make the manifest fit the files that are there, after a change; return its hash."""
    body = body_of(checkpoint)
    change(body)
    files = [file for file in checkpoint.rglob("*") if file.is_file() and file.name != NAME]
    body["files"] = {
        str(file.relative_to(checkpoint)): {"size": file.stat().st_size, "hash": hash_file(file)} for file in files
    }
    return write_manifest(checkpoint, body)


def write_manifest(checkpoint: Path, body: Mapping[str, Any]) -> str:
    """Write a manifest with its envelope; return its hash."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hash_bytes(canonical.encode())
    (checkpoint / NAME).write_text(f'{{"manifest":{canonical},"xxh3_128":"{digest}"}}')
    return digest


def follow(checkpoint: Path, step: int) -> Path:
    """Return the checkpoint that the run saved after another one: with its files, and a manifest that names it."""
    digest, step_before = json.loads((checkpoint / NAME).read_bytes())["xxh3_128"], body_of(checkpoint)["step"]
    later = Path(shutil.copytree(checkpoint, checkpoint.with_name(f"step-{step:08d}")))
    rewritten(later, lambda body: body.update(step=step, parent=digest, parent_step=step_before))
    return later


def write_checkpoint(checkpoint: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write whole tensors as one rank did."""
    checkpoint.mkdir(parents=True)
    with warnings.catch_warnings(action="ignore"):  # it is told to save in a single process
        dcp.save(dict(tensors), checkpoint_id=checkpoint / "dcp", no_dist=True)
    entries = {
        key: TensorEntry(
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            (Chunk((0,) * tensor.ndim, tuple(tensor.shape), hash_tensor(tensor), ""),),
        )
        for key, tensor in tensors.items()
    }
    body = asdict(Manifest("a" * 32, int(checkpoint.name[5:]), ("model",), {}, entries)) | {"format": 2}
    for entry in body["tensors"].values():
        for chunk in entry["chunks"]:
            del chunk["file"]
    write_manifest(checkpoint, body)
    rewritten(checkpoint)
