"""Where a model's tensors come from: files or a live module (or `random_start`); handed out group by group.

Each group yields only the rows that are asked for, so a rank reads its shards and holds at most one converted tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from holdfast.models.names import canonical_name
from holdfast.models.weights.conversion import Conversion, Header
from holdfast.models.weights.safetensors_files import StoredTensors

Rows = Mapping[str, slice]
"""Tensor name to the rows (of dimension 0) that are wanted."""


class WeightGroup(Protocol):
    """Tensors that come into being together."""

    @property
    def targets(self) -> Mapping[str, Header]:
        """What the group yields, whole."""
        ...

    def load(self, rows: Rows) -> dict[str, Tensor]:
        """Return the wanted rows of each tensor named in `rows`, on the CPU."""
        ...


class WeightSource(Protocol):
    """All tensors of a model, canonical names."""

    def groups(self) -> Iterator[WeightGroup]:
        """Yield the groups, in an order that every rank shares."""
        ...


@dataclass(frozen=True)
class StoredGroup:
    """Tensors converted from a directory's files."""

    stored: StoredTensors
    conversion: Conversion
    grow_rows: Mapping[str, int]
    """Names of embeddings to the rows they shall have (resize_vocab)."""

    @property
    def targets(self) -> Mapping[str, Header]:
        """Shapes after growing."""
        return {
            name: Header(
                (self.grow_rows.get(name, header.shape[0] if header.shape else 0), *header.shape[1:]), header.dtype
            )
            if header.shape
            else header
            for name, header in self.conversion.targets.items()
        }

    def load(self, rows: Rows) -> dict[str, Tensor]:
        """Read and convert; of a tensor that is only renamed or stacked, no more than the wanted rows are read."""
        (name,) = self.conversion.targets if len(self.conversion.targets) == 1 else (None,)
        if name is not None and self.conversion.renames_only and name not in self.grow_rows:
            part = rows[name]
            is_scalar = not self.conversion.targets[name].shape
            return {name: self.stored.read(self.conversion.sources[0], None if is_scalar else part)}
        if name is not None and self.conversion.rows is not None:
            return {name: self._stacked(name, self.conversion.rows, rows[name])}
        converted = self.conversion.run({source: self.stored.read(source) for source in self.conversion.sources})
        return {target: self._grown(target, converted[target])[part] for target, part in rows.items()}

    def _stacked(self, name: str, sources: Sequence[Sequence[str]], rows: slice) -> Tensor:
        header = self.conversion.targets[name]
        tensor = torch.empty(len(sources[rows]), *header.shape[1:], dtype=header.dtype)
        for row, members in zip(tensor, sources[rows], strict=True):
            row.copy_(self.conversion.run({source: self.stored.read(source) for source in members})[name][0])
        return tensor

    def _grown(self, name: str, tensor: Tensor) -> Tensor:
        missing = self.grow_rows.get(name, tensor.shape[0]) - tensor.shape[0] if tensor.ndim else 0
        if missing <= 0:
            return tensor
        mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
        return torch.cat([tensor, mean.expand(missing, *tensor.shape[1:])])


@dataclass(frozen=True)
class StoredSource:
    """A directory, through transformers' conversion mapping."""

    stored: StoredTensors
    conversions: tuple[Conversion, ...]
    grow_rows: Mapping[str, int]

    def groups(self) -> Iterator[WeightGroup]:
        """Yield conversions file by file as far as their order allows."""
        for conversion in self.conversions:
            yield StoredGroup(self.stored, conversion, self.grow_rows)


@dataclass(frozen=True)
class LiveSource:
    """A module that the caller has in memory."""

    module: nn.Module

    def groups(self) -> Iterator[WeightGroup]:
        """Yield one group per tensor."""
        for name, tensor in self.module.state_dict().items():
            yield _LiveGroup(canonical_name(name), tensor)


@dataclass(frozen=True)
class _LiveGroup:
    name: str
    tensor: Tensor

    @property
    def targets(self) -> Mapping[str, Header]:
        return {self.name: Header(tuple(self.tensor.shape), self.tensor.dtype)}

    def load(self, rows: Rows) -> dict[str, Tensor]:
        tensor = self.tensor.detach().cpu()
        return {self.name: tensor[rows[self.name]] if tensor.ndim else tensor}
