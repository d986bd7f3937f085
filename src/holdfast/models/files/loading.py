"""Sources of a model's tensors: files, a live module, or random initialisation. Each yields groups of tensors.

A group loads only the rows that are requested, so that a rank reads its own shards and holds at most one converted
tensor.

Random initialisation gives the same weights on any number of ranks: each part of the model (a block, an embedding) is
drawn completely, from a seed derived from its path, by transformers' initialisers. A part includes all modules below
it, since some initialisers also set the tensors of inner modules (GPT-2 scales its output projections, Mamba sets its
time steps).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from holdfast.errors import ModelError
from holdfast.models.files.conversion import Conversion, Header
from holdfast.models.files.safetensors_files import StoredTensors
from holdfast.models.names import canonical_name

RowSlices = Mapping[str, slice]
"""Requested rows (of dimension 0) by name of the tensor."""


@dataclass(frozen=True)
class WeightGroup:
    """Tensors that are loaded together."""

    targets: Mapping[str, Header]
    """Headers of the whole tensors that the group yields."""
    load: Callable[[RowSlices], dict[str, Tensor]]
    """Returns the wanted rows of each tensor named in its argument, on the CPU."""


class WeightSource(Protocol):
    """All tensors of a model, canonical names."""

    def groups(self) -> Iterator[WeightGroup]:
        """Yield the groups, in an order that every rank shares."""


@dataclass(frozen=True)
class StoredSource:
    """A directory, through transformers' conversion mapping."""

    stored: StoredTensors
    conversions: tuple[Conversion, ...]
    grow_rows: Mapping[str, int]
    """New numbers of rows by name of the embedding (`model.resize_vocab`)."""

    def groups(self) -> Iterator[WeightGroup]:
        """Yield conversions file by file as far as their order allows."""
        for conversion in self.conversions:
            targets = {name: self._grown_header(name, header) for name, header in conversion.targets.items()}
            yield WeightGroup(targets, partial(self._load, conversion))

    def _grown_header(self, name: str, header: Header) -> Header:
        rows = self.grow_rows.get(name)
        return header if rows is None or not header.shape else Header((rows, *header.shape[1:]), header.dtype)

    def _load(self, conversion: Conversion, rows: RowSlices) -> dict[str, Tensor]:
        """Read and convert; of a tensor that is only renamed or stacked, no more than the wanted rows are read."""
        (name,) = conversion.targets if len(conversion.targets) == 1 else (None,)
        if name is not None and conversion.renames_only and name not in self.grow_rows:
            is_scalar = not conversion.targets[name].shape
            return {name: self.stored.read(conversion.sources[0], None if is_scalar else rows[name])}
        if name is not None and conversion.rows is not None:
            return {name: self._stacked(name, conversion, conversion.rows[rows[name]])}
        converted = conversion.run({source: self.stored.read(source) for source in conversion.sources})
        return {target: self._grown(target, converted[target])[row_slice] for target, row_slice in rows.items()}

    def _stacked(self, name: str, conversion: Conversion, sources: Sequence[Sequence[str]]) -> Tensor:
        header = conversion.targets[name]
        tensor = torch.empty(len(sources), *header.shape[1:], dtype=header.dtype)
        for row, members in zip(tensor, sources, strict=True):
            row.copy_(conversion.run({source: self.stored.read(source) for source in members})[name][0])
        return tensor

    def _grown(self, name: str, tensor: Tensor) -> Tensor:
        missing = self.grow_rows.get(name, tensor.shape[0]) - tensor.shape[0] if tensor.ndim else 0
        if missing <= 0:
            return tensor
        mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
        return torch.cat([tensor, mean.expand(missing, *tensor.shape[1:])])


@dataclass(frozen=True)
class LiveSource:
    """A module that the caller has in memory."""

    module: nn.Module

    def groups(self) -> Iterator[WeightGroup]:
        """Yield one group per tensor."""
        for name, tensor in self.module.state_dict().items():
            targets = {canonical_name(name): Header(tuple(tensor.shape), tensor.dtype)}
            yield WeightGroup(targets, partial(_live_rows, tensor))


def _live_rows(tensor: Tensor, rows: RowSlices) -> dict[str, Tensor]:
    values = tensor.detach().cpu()
    return {name: values[row_slice] if values.ndim else values for name, row_slice in rows.items()}


@dataclass(frozen=True)
class RandomSource:
    """Tensors of a randomly initialised model."""

    model: Any
    """A transformers model on the meta device."""
    seed: int

    def groups(self) -> Iterator[WeightGroup]:
        """Yield the parts, each parameter in one of them."""
        yielded: set[int] = set()
        for path, module, owner, recursive in _parts("", self.model, self.model):
            parameters = dict(module.named_parameters(recurse=recursive))
            new_parameters = {name: value for name, value in parameters.items() if id(value) not in yielded}
            yielded |= {id(value) for value in new_parameters.values()}
            if new_parameters:
                module_group = _RandomModule(
                    module, owner, canonical_name(path), recursive, tuple(new_parameters), self.seed
                )
                headers = {
                    module_group.full(name): Header(tuple(value.shape), torch.float32)
                    for name, value in new_parameters.items()
                }
                yield WeightGroup(headers, module_group.load)


def _parts(path: str, module: nn.Module, owner: Any) -> Iterator[tuple[str, nn.Module, Any, bool]]:
    """Yield (path, module, the model whose initialiser serves it, whether all below belongs to the part)."""
    owner = _owner(module, owner)
    if not any(isinstance(descendant, nn.ModuleList) for descendant in module.modules()):
        yield path, module, owner, True
        return
    yield path, module, owner, False
    for name, child in module.named_children():
        below = f"{path}.{name}".lstrip(".")
        if isinstance(module, nn.ModuleList):
            yield below, child, owner, True
        else:
            yield from _parts(below, child, owner)


def _owner(module: nn.Module, owner: Any) -> Any:
    from transformers import PreTrainedModel

    return module if isinstance(module, PreTrainedModel) else owner


@dataclass(frozen=True)
class _RandomModule:
    module: nn.Module
    owner: Any
    path: str
    recursive: bool
    names: tuple[str, ...]
    seed: int

    def load(self, rows: RowSlices) -> dict[str, Tensor]:
        """Draw the part in float32 and cut the wanted rows.

        Raises:
            ModelError: The architecture leaves a tensor undrawn.
        """
        twin = copy.deepcopy(self.module) if self.recursive else copy.copy(self.module)
        for module in twin.modules() if self.recursive else [twin]:
            _empty(module)
        digest = hashlib.sha256(f"{self.seed}:{self.path}".encode()).digest()
        # `devices=[]`: by default fork_rng also saves and restores the generators of all GPUs, and thereby initialises
        # CUDA.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest[:7], "little"))
            _initialise(twin, self.owner, below=self.recursive)
        drawn = {self.full(name): twin.get_parameter(name).detach() for name in self.names}
        undrawn = [name for name, value in drawn.items() if torch.isnan(value).any()]
        if undrawn:
            raise ModelError(
                f"{type(self.owner).__name__} does not initialise {', '.join(undrawn)}; a random start is not "
                "possible. Save a model with transformers and set model.path."
            )
        return {name: drawn[name][row_slice] if drawn[name].ndim else drawn[name] for name, row_slice in rows.items()}

    def full(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def _initialise(module: nn.Module, owner: Any, *, below: bool) -> None:
    """Run transformers' initialiser, children first, as `PreTrainedModel.initialize_weights` does."""
    for child in module.children() if below else ():
        _initialise(child, _owner(child, owner), below=True)
    owner._init_weights(module)  # noqa: SLF001 - it has no public name


def _empty(module: nn.Module) -> None:
    """Give a copied module parameters of its own: NaN on the CPU, so that one that is left undrawn shows."""
    # Assigned past `register_parameter`, so that the copy shares no dictionary with the module it was copied from.
    module._parameters = {
        name: None if value is None else nn.Parameter(torch.full(value.shape, float("nan")), requires_grad=False)
        for name, value in module._parameters.items()
    }
    module._buffers = {
        name: None if value is None else torch.zeros(value.shape, dtype=value.dtype)
        for name, value in module._buffers.items()
    }
