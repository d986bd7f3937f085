"""Where a model's tensors come from: files, a random start, or a live module; handed out group by group.

Each group yields only the rows that are asked for, so a rank reads its shards and holds at most one converted tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from holdfast.errors import ModelError
from holdfast.models.conversion import Conversion, Header
from holdfast.models.names import canonical_name
from holdfast.models.safetensors_files import StoredTensors

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

    def _stacked(self, name: str, sources: Sequence[Sequence[str]], wanted: slice) -> Tensor:
        header = self.conversion.targets[name]
        tensor = torch.empty(len(sources[wanted]), *header.shape[1:], dtype=header.dtype)
        for row, members in zip(tensor, sources[wanted], strict=True):
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
class RandomSource:
    """A random start that is the same for every number of ranks: each module is drawn whole, from a seed of its own."""

    model: Any
    """A transformers model on the meta device; its `_init_weights` is the initialiser."""
    seed: int

    def groups(self) -> Iterator[WeightGroup]:
        """Yield one group per module that owns parameters."""
        seen: set[int] = set()
        for path, module in self.model.named_modules():
            own = {name: value for name, value in module.named_parameters(recurse=False) if id(value) not in seen}
            seen |= {id(value) for value in own.values()}
            if own:
                yield _RandomGroup(self.model, module, canonical_name(path), tuple(own), self.seed)


@dataclass(frozen=True)
class _RandomGroup:
    model: Any
    module: nn.Module
    path: str
    names: tuple[str, ...]
    seed: int

    @property
    def targets(self) -> Mapping[str, Header]:
        parameters = dict(self.module.named_parameters(recurse=False))
        return {self._full(name): Header(tuple(parameters[name].shape), torch.float32) for name in self.names}

    def load(self, rows: Rows) -> dict[str, Tensor]:
        """Draw the module's tensors in float32 and cut the wanted rows.

        Raises:
            ModelError: The architecture leaves one of them undrawn.
        """
        twin = _empty_twin(self.module)
        digest = hashlib.sha256(f"{self.seed}:{self.path}".encode()).digest()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest[:7], "little"))
            self.model._init_weights(twin)  # noqa: SLF001 - transformers' initialiser has no public name
        drawn = {name: getattr(twin, name).detach() for name in self.names}
        undrawn = [self._full(name) for name, value in drawn.items() if torch.isnan(value).any()]
        if undrawn:
            raise ModelError(
                f"{type(self.model).__name__} does not initialise {', '.join(undrawn)}; a random start is not "
                "possible. Save a model with transformers and set model.path."
            )
        whole = {self._full(name): value for name, value in drawn.items()}
        return {name: whole[name][part] if whole[name].ndim else whole[name] for name, part in rows.items()}

    def _full(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def _empty_twin(module: nn.Module) -> nn.Module:
    """Return a shallow copy of a module whose own parameters are NaN on the CPU; children are shared, not touched."""
    twin = module.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin._parameters = {
        name: None if value is None else nn.Parameter(torch.full(value.shape, float("nan")), requires_grad=False)
        for name, value in module._parameters.items()
    }
    twin._buffers = {
        name: None if value is None else torch.zeros(value.shape, dtype=value.dtype)
        for name, value in module._buffers.items()
    }
    return twin


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
