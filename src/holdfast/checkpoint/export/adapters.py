"""Write adapters in peft's format: two small files that load onto the model they were trained on."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from holdfast.checkpoint.export.about import with_file_hashes
from holdfast.checkpoint.export.card import laid_cards, with_card
from holdfast.checkpoint.export.model import (
    ExportReached,
    check_bytes,
    check_target,
    replace_directory,
    settled,
    write_texts,
)
from holdfast.checkpoint.export.small_files import ExportFailed
from holdfast.checkpoint.place.layout import STAGING
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.models.adapters.files import BASE, PEFT_PREFIX, SETTINGS, WEIGHTS, names_in_file
from holdfast.models.files.conversion import Header
from holdfast.models.files.safetensors_files import read_header, write_file
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.shards import sharded_parameters
from holdfast.parallel.stream import full_tensor


@dataclass(frozen=True)
class Description:
    """What peft, and a later run, must know of adapters."""

    settings: str
    """adapter_config.json"""
    base: str | None
    """The mark of the weights they were trained beside; None for none that lie in files."""


def export_adapters(
    policy: nn.Module,
    about: Description,
    directory: Path,
    ranks: RankGroup,
    texts: Mapping[str, str],
    *,
    reached: ExportReached = lambda _: None,
) -> None:
    """Write `directory`, whole or not at all; every rank calls this, rank 0 writes.

    Args:
        policy: The sharded model, with adapters.
        about: Of its adapters.
        directory: Replaced if it exists.
        ranks: The ranks.
        texts: Small files to lay beside, by name.
        reached: Told each of an export's phases as it begins, on rank 0.

    Raises:
        ExportFailed: Writing failed, or what was written reads back differently; on all ranks.
    """
    ranks.on_first_rank(lambda: check_target(directory))
    parameters = sharded_parameters(policy)
    tensors = {PEFT_PREFIX + name: full_tensor(parameters[name]).cpu().contiguous() for name in names_in_file(policy)}
    ranks.on_first_rank(lambda: write_adapters(directory, tensors, about, texts, reached))


def write_adapters(
    directory: Path,
    tensors: Mapping[str, Tensor],
    about: Description,
    texts: Mapping[str, str],
    reached: ExportReached = lambda _: None,
) -> None:
    """Write what `export_adapters` does, on one process, from tensors under peft's names.

    Raises:
        ExportFailed: As `export_adapters`.
    """
    staging = directory.parent / f"{STAGING}{directory.name}-{uuid.uuid4().hex[:8]}"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        reached("tensors")
        headers = {name: Header(tuple(tensor.shape), tensor.dtype) for name, tensor in sorted(tensors.items())}
        # Not by safetensors' own function, which writes notes in another order each time.
        with LocalStorage(staging).create(WEIGHTS, sync=False) as file:
            notes = {} if about.base is None else {BASE: about.base}
            write_file(file, headers, ((name, iter([tensors[name]])) for name in headers), notes)
        reached("assets")
        hashes = {WEIGHTS: file.hexdigest()}
        laid = laid_cards(with_card(with_file_hashes(texts, staging, hashes), adapter=True), directory, None)
        hashes |= write_texts(staging, {**laid, SETTINGS: about.settings})
        reached("read back")
        with settled(staging, hashes):
            check_bytes(staging, hashes)
        if read_header(staging / WEIGHTS) != headers or not _same(staging / WEIGHTS, tensors):
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
