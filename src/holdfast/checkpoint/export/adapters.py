"""Write adapters in peft's format: two small files that load onto the model they were trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from holdfast.checkpoint.export.card import Papers
from holdfast.checkpoint.export.write import ExportReached, Weights, raised_together, with_dtype, write_export
from holdfast.models.adapters.files import BASE, PEFT_PREFIX, SETTINGS, WEIGHTS, names_in_file
from holdfast.models.files.conversion import Header, renamed
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.shards import sharded_parameters
from holdfast.parallel.stream import Holding, headers_of


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
    papers: Papers,
    *,
    reached: ExportReached = lambda _: None,
) -> None:
    """Write `directory`, whole or not at all; every rank calls this, rank 0 writes.

    Args:
        policy: The sharded model, with adapters.
        about: Of its adapters.
        directory: Replaced if it exists.
        ranks: The ranks.
        papers: What the export says of itself.
        reached: Told each of an export's phases as it begins, on rank 0.

    Raises:
        ExportFailed: Any rank has an error, or what was written reads back differently; on all ranks.
    """
    with raised_together(directory, ranks):
        parameters = sharded_parameters(policy)
        tensors = {name: parameters[name] for name in names_in_file(policy)}
        headers = headers_of(tensors, None)
    write_adapters(tensors.__getitem__, headers, about, directory, ranks, papers, reached=reached)


def write_adapters(  # noqa: PLR0913 - as `export_adapters`
    read: Callable[[str], Holding],
    headers: Mapping[str, Header],
    about: Description,
    directory: Path,
    ranks: RankGroup,
    papers: Papers,
    *,
    dtype: torch.dtype | None = None,
    reached: ExportReached = lambda _: None,
) -> None:
    """Write what `export_adapters` does, from tensors in memory or on disk.

    Args:
        read: Returns a tensor, or this rank's shard of it, by canonical name.
        headers: Shape and dtype of each.
        about, directory, ranks, papers, reached: As in `export_adapters`.
        dtype: Cast to this; None keeps what is stored.

    Raises:
        ExportFailed: As `export_adapters`.
    """
    names = {PEFT_PREFIX + name: name for name in sorted(headers)}
    plan = renamed(names, with_dtype({target: headers[name] for target, name in names.items()}, dtype))
    notes = {} if about.base is None else {BASE: about.base}
    weights = Weights(read, plan, {WEIGHTS: list(names)}, dtype, notes)
    papers = replace(papers, texts={**papers.texts, SETTINGS: about.settings})
    write_export(weights, papers, directory, ranks, None, reached)
