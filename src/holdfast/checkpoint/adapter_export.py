"""Write adapters in peft's format: two small files that load onto the model they were trained on."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from holdfast.checkpoint.export import (
    ExportFailed,
    Reached,
    check_bytes,
    check_target,
    replace_directory,
    settle,
    write_texts,
)
from holdfast.models.conversion import Header
from holdfast.models.lora import PEFT_PREFIX, SETTINGS, WEIGHTS, adapters_of
from holdfast.models.safetensors_files import read_header
from holdfast.parallel.collectives import ProcessExchange
from holdfast.parallel.materialise import sharded_parameters
from holdfast.parallel.stream import full_tensor


def export_adapters(
    policy: nn.Module,
    settings: str,
    directory: Path,
    exchange: ProcessExchange,
    texts: Mapping[str, str],
    *,
    reached: Reached = lambda _: None,
) -> None:
    """Write `directory`, whole or not at all; every rank calls this, rank 0 writes.

    Args:
        policy: The sharded model, with adapters.
        settings: adapter_config.json.
        directory: Replaced if it exists.
        exchange: The ranks.
        texts: Small files to lay beside, by name.
        reached: Told each of an export's phases as it begins, on rank 0.

    Raises:
        ExportFailed: Writing failed, or what was written reads back differently; on all ranks.
    """
    with exchange.together():
        if exchange.rank == 0:
            check_target(directory)
    parameters = sharded_parameters(policy)
    names = [name for adapter in adapters_of(policy).values() for name in (adapter.a, adapter.b)]
    tensors = {PEFT_PREFIX + name: full_tensor(parameters[name]).cpu().contiguous() for name in names}
    with exchange.together():
        if exchange.rank == 0:
            write_adapters(directory, tensors, {**texts, SETTINGS: settings}, reached)


def write_adapters(
    directory: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str], reached: Reached = lambda _: None
) -> None:
    """Write what `export_adapters` does, on one process, from tensors under peft's names.

    Raises:
        ExportFailed: As `export_adapters`.
    """
    staging = directory.parent / f".staging-{directory.name}-{uuid.uuid4().hex[:8]}"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        reached("tensors")
        save_file(dict(tensors), staging / WEIGHTS, metadata={"format": "pt"})
        reached("assets")
        hashes = settle(staging, write_texts(staging, texts))
        reached("read back")
        check_bytes(staging, hashes)
        wanted = {name: Header(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        if read_header(staging / WEIGHTS) != wanted or not _same(staging / WEIGHTS, tensors):
            raise ExportFailed(f"{staging / WEIGHTS} reads back differently from what was written.")
        reached("publish")
        replace_directory(staging, directory)
        reached("published")
    except OSError as error:
        raise ExportFailed(f"{directory} could not be written: {error}.") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _same(path: Path, tensors: Mapping[str, Tensor]) -> bool:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())
