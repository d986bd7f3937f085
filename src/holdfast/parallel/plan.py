"""The sharding plan: a pure function from the names and shapes of parameters to the FSDP units of a model.

A plan can be printed, costed by `holdfast plan`, and recorded in a checkpoint, all without a process group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from holdfast.config.sections.parallel import (
    EveryKRecompute,
    FullRecompute,
    ParallelConfig,
    SelectiveRecompute,
)
from holdfast.errors import PlanError

ROOT = "(root)"
Recomputed = Literal["none", "full", "selective"]
InBackward = Literal["gathered", "not_read", "as_the_loss_says"]


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter without its data."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Storage, such as float32."""
    trainable: bool
    aliases: tuple[str, ...] = ()
    """Other names of a tied parameter."""
    stands_for: int = 0
    """Number of weights that a packed (4-bit) parameter encodes; 0 for a plain one."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def bytes_(self) -> int:
        """Size in storage."""
        return self.numel * {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}.get(self.dtype, 4)


@dataclass(frozen=True)
class ShardUnit:
    """Parameters that are gathered and freed together."""

    name: str
    modules: tuple[str, ...]
    """Canonical paths; empty for the root, which holds what no other unit does."""
    parameters: tuple[str, ...]
    axis: Literal["shard"]
    shard_dim: int
    reshard: bool
    """Free the gathered parameters after the forward pass."""
    bytes_: int
    """Storage of all its parameters, over all ranks of one copy."""
    trainable: int
    """Elements that are trained."""
    in_backward: InBackward = "gathered"
    """Whether the backward pass reads the parameters: an embedding's does not ("not_read"), a head's only where the
    loss has not computed the head's gradients in the forward pass ("as_the_loss_says")."""


@dataclass(frozen=True)
class ModelEnds:
    """Canonical paths of embedding and head, which form separate units, so that each is gathered only while in use."""

    embedding: str | None = None
    """The token embedding; None where modules other than its own lookup read the matrix too."""
    head: str | None = None
    """The layer of logits, whose matrix a policy's loss reads within a call of the layer."""
    read_by_root: str | None = None
    """A layer whose matrix the root reads outside of a call of the layer, so that it cannot be a unit."""


@dataclass(frozen=True)
class ShardPlan:
    """Which parameters are gathered together, what is recomputed and compiled, and in which dtypes; see `apply.py`."""

    units: tuple[ShardUnit, ...]
    """Innermost first, the root last."""
    replicated: tuple[str, ...]
    """Frozen scalars, which cannot be split: every rank keeps them."""
    recompute: Mapping[str, Recomputed]
    """Block path to how its activations come back in the backward pass."""
    compile_blocks: tuple[str, ...]
    replicate: int
    shard: int
    compute_dtype: str
    reduce_dtype: str
    reduce_last_only: bool
    """Reduce gradients once per update instead of after every micro-batch."""
    cpu_offload: bool
    sharded: bool
    """False for one rank that computes in its storage dtype, or from copies: there is nothing to split or gather."""
    shard_bytes: int
    """Bytes that each rank stores; FSDP2 pads a parameter's first dimension to a multiple of the number of ranks."""
    parameters: int
    trainable: int
    offload_blocks: tuple[str, ...] = ()
    """Blocks whose activations are offloaded to host memory, in order; see `activations.py`."""
    copied: bool = False
    """Whether the passes of one rank read copies of float32 parameters in the compute dtype; see `copies.py`."""

    @property
    def whole(self) -> bool:
        """Whether passes read the parameters as they are stored, which what samples in the process then reads too."""
        return not self.sharded and not self.copied

    def describe(self) -> str:
        """Return a few lines for the start of a run."""
        largest = max(self.units, key=lambda unit: unit.bytes_)
        total = sum(unit.bytes_ for unit in self.units)
        kinds = sorted(set(self.recompute.values()))
        lines = [
            f"{self.parameters:,} parameters, {self.trainable:,} trained, {self.parameters - self.trainable:,} frozen",
            f"{len(self.units)} units over shard={self.shard} replicate={self.replicate}; largest {largest.name} "
            f"{_mib(largest.bytes_)}; shards {_mib(self.shard_bytes)} per rank{self._padding(total)}"
            if self.sharded
            else f"one rank, whole parameters: {_mib(total)}"
            + (f", and copies in {self.compute_dtype} that its passes read" if self.copied else ""),
            f"compute {self.compute_dtype}, reduce {self.reduce_dtype}"
            + (" on the last micro-batch" if self.reduce_last_only else "")
            + (f", {len(self.recompute)} blocks recomputed ({', '.join(kinds)})" if self.recompute else "")
            + (", parameters in host memory" if self.cpu_offload else "")
            + (f", activations of {len(self.offload_blocks)} blocks in host memory" if self.offload_blocks else ""),
        ]
        return "\n".join(lines)

    def _padding(self, total: int) -> str:
        padded = self.shard_bytes > 1.25 * total / self.shard
        return f", {_mib(self.shard_bytes - total / self.shard)} of them padding" if padded else ""


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def plan_shards(  # noqa: PLR0913 - all that a plan depends on, which is a pure function
    parameters: Sequence[ParameterInfo],
    modules: Sequence[str],
    blocks: Sequence[str],
    config: ParallelConfig,
    *,
    shard: int,
    device: str,
    towers: Sequence[str] = (),
    ends: ModelEnds = ModelEnds(),  # noqa: B008 - frozen
    compiled: bool = False,
) -> ShardPlan:
    """Plan how parameters are split.

    Args:
        parameters: Of the whole model, canonical names, one entry per tie.
        modules: Canonical paths of all modules that run by themselves, for `parallel.units`.
        blocks: Canonical paths of the transformer blocks, in order.
        config: The section.
        shard: Ranks of one copy.
        device: cpu or cuda.
        towers: Canonical paths of modules that only some batches run; each is a unit, its blocks aside.
        ends: Embedding and head. Where they are tied they stay with the root, gathered to the end of a backward pass.
        compiled: Whether blocks are compiled.

    Raises:
        PlanError: A pattern matches nothing, or a parameter cannot be placed; parameters are named.
    """
    _refuse_scalars(parameters)
    groups = _groups(modules, blocks, towers, config) | _ends_apart(parameters, ends)
    _refuse_read_by_root(ends.read_by_root, groups)
    _refuse_split_ties(parameters, groups)
    trained = any(parameter.trainable for parameter in parameters)
    numbers = [parameter for parameter in parameters if not parameter.stands_for]
    storage = {parameter.dtype for parameter in numbers if parameter.trainable or not trained}
    wide = "float64" if "float64" in storage else "float32"
    compute = _compute_dtype(config.compute_dtype, wide, storage, device)
    last_only = _reduce_last_only(config, storage)
    alone = shard * config.replicate == 1 and "parameters" not in config.offloads
    read = _read_alone(numbers, compute, last_only=last_only) if alone else None
    return ShardPlan(
        units=_units(parameters, groups, ends, config),
        replicated=tuple(parameter.name for parameter in parameters if not parameter.shape),
        recompute=_recompute(blocks, config),
        compile_blocks=tuple(blocks) if compiled else (),
        replicate=config.replicate,
        shard=shard,
        compute_dtype=compute,
        reduce_dtype=wide,
        reduce_last_only=last_only,
        cpu_offload="parameters" in config.offloads,
        offload_blocks=tuple(blocks) if trained and "activations" in config.offloads else (),
        sharded=read is None,
        shard_bytes=_shard_bytes(parameters, shard),
        parameters=_count(parameters),
        trainable=_count([parameter for parameter in parameters if parameter.trainable]),
        copied=read == "copies",
    )


def _read_alone(
    numbers: Sequence[ParameterInfo], compute: str, *, last_only: bool
) -> Literal["parameters", "copies"] | None:
    """Return what the passes of a rank alone can read without FSDP2, to its numbers and for little more memory."""
    shaped = [parameter for parameter in numbers if parameter.shape]
    trained = [parameter for parameter in shaped if parameter.trainable]
    cast = [parameter for parameter in shaped if parameter.dtype != compute]
    if not cast:  # autograd adds gradients in the storage of their parameters
        return None if trained and last_only else "parameters"
    if compute != "bfloat16" or any(parameter.dtype != "float32" for parameter in (*cast, *trained)):
        return None
    # A copy of a frozen parameter would never change and take half as much memory again: FSDP2 casts it block by block.
    return "copies" if 2 * _count(trained) >= _count(cast) else None


def _shard_bytes(parameters: Sequence[ParameterInfo], shard: int) -> int:
    split = [parameter for parameter in parameters if parameter.numel and parameter.shape]
    return sum(parameter.bytes_ // parameter.shape[0] * -(-parameter.shape[0] // shard) for parameter in split)


def _count(parameters: Sequence[ParameterInfo]) -> int:
    return sum(parameter.stands_for or parameter.numel for parameter in parameters)


def _ends_apart(parameters: Sequence[ParameterInfo], ends: ModelEnds) -> dict[str, tuple[str, ...]]:
    """Return the units of embedding and head, without what is tied to a parameter elsewhere."""
    paths = [path for path in (ends.embedding, ends.head) if path is not None]
    tied = {name for parameter in parameters if parameter.aliases for name in (parameter.name, *parameter.aliases)}
    return {path: (path,) for path in paths if not any(name.startswith(f"{path}.") for name in tied)}


def _units(
    parameters: Sequence[ParameterInfo], groups: Mapping[str, tuple[str, ...]], ends: ModelEnds, config: ParallelConfig
) -> tuple[ShardUnit, ...]:
    """Deal parameters out to units, innermost unit first, the root last."""
    members: dict[str, list[ParameterInfo]] = {name: [] for name in (*groups, ROOT)}
    for parameter in parameters:
        if parameter.shape:
            members[_owner(parameter.name, groups)].append(parameter)
    innermost_first = sorted(groups.items(), key=lambda item: -max(path.count(".") for path in item[1]))
    read: dict[str | None, InBackward] = {ends.embedding: "not_read", ends.head: "as_the_loss_says"}
    return tuple(
        _unit(name, paths, members[name], config, read.get(name, "gathered"))
        for name, paths in [*innermost_first, (ROOT, ())]
    )


def _reduce_last_only(config: ParallelConfig, storage: set[str]) -> bool:
    # FSDP2 casts a reduced gradient to its parameter's dtype and adds there: 256 micro-batches in bfloat16 storage
    # summed to 5.0625 where 5.125 was exact. Held back until the last micro-batch, they add in float32.
    if config.reduce == "auto":
        return "bfloat16" in storage
    return config.reduce == "last_micro_batch"


def _compute_dtype(setting: str, wide: str, storage: set[str], device: str) -> str:
    if wide == "float64":
        return "float64"
    if setting != "auto":
        return setting
    if device == "cuda" or storage == {"bfloat16"}:
        return "bfloat16"
    return "float32"


def _groups(
    modules: Sequence[str], blocks: Sequence[str], towers: Sequence[str], config: ParallelConfig
) -> dict[str, tuple[str, ...]]:
    """Return unit name -> module paths, the root left out."""
    if not config.units:
        groups = {}
        for run in _neighbours(blocks, config.blocks_per_unit):
            name = run[0] if len(run) == 1 else f"{run[0]}..{run[-1].rpartition('.')[2]}"
            groups[name] = tuple(run)
        return groups | {path: (path,) for path in towers}
    pattern_units: dict[str, tuple[str, ...]] = {}
    for pattern in config.units:
        matched = [path for path in modules if path and re.search(pattern, path)]
        if not matched:
            raise PlanError(
                f"parallel.units: {pattern!r} matches no module that runs by itself. Modules are named like "
                f"{', '.join(modules[1:4])}."
            )
        pattern_units |= {path: (path,) for path in matched}
    return {path: (path,) for path in _tower_units(blocks, towers, pattern_units)} | pattern_units


def _tower_units(
    blocks: Sequence[str], towers: Sequence[str], pattern_units: Mapping[str, tuple[str, ...]]
) -> list[str]:
    """Return the units of towers where `parallel.units` has patterns, which need not mention towers.

    Each tower is a unit, and so is each of its blocks unless a pattern matched a module inside that tower. Left to the
    root, a tower would be gathered in every forward pass and kept to its end, even in batches without images.
    """
    units = list(towers)
    for tower in towers:
        if not any(path.startswith(f"{tower}.") for path in pattern_units):
            units += [path for path in blocks if path.startswith(f"{tower}.")]
    return units


def _neighbours(blocks: Sequence[str], size: int) -> list[list[str]]:
    runs: list[list[str]] = []
    for path in blocks:
        parent = path.rpartition(".")[0]
        if runs and len(runs[-1]) < size and runs[-1][0].rpartition(".")[0] == parent:
            runs[-1].append(path)
        else:
            runs.append([path])
    return runs


def _owner(name: str, groups: Mapping[str, tuple[str, ...]]) -> str:
    """Return the unit with the deepest module that holds a parameter."""
    best, depth = ROOT, -1
    for unit, members in groups.items():
        for path in members:
            if name.startswith(path + ".") and path.count(".") > depth:
                best, depth = unit, path.count(".")
    return best


def _refuse_scalars(parameters: Sequence[ParameterInfo]) -> None:
    scalars = [parameter.name for parameter in parameters if not parameter.shape and parameter.trainable]
    if scalars:
        raise PlanError(
            f"{', '.join(scalars)}: a trained parameter without dimensions cannot be sharded. Freeze it "
            "(model.freeze), or give it shape [1] in the model."
        )


def _refuse_read_by_root(path: str | None, groups: Mapping[str, tuple[str, ...]]) -> None:
    if path in groups:
        raise PlanError(
            f"parallel.units makes a unit of {path}, and the loss reads {path}.weight outside of it, where FSDP2 has "
            "only a shard. Leave it to the root: choose patterns that do not match it, such as 'layers\\.\\d+$'."
        )


def _refuse_split_ties(parameters: Sequence[ParameterInfo], groups: Mapping[str, tuple[str, ...]]) -> None:
    for parameter in parameters:
        owners = {name: _owner(name, groups) for name in (parameter.name, *parameter.aliases)}
        if len(set(owners.values())) > 1:
            listing = ", ".join(f"{name} in {unit}" for name, unit in owners.items())
            raise PlanError(
                f"A tied parameter would lie in two units ({listing}), and FSDP2 would untie it. Change parallel.units "
                "so that both names fall into one."
            )


def _unit(
    name: str,
    modules: tuple[str, ...],
    members: Sequence[ParameterInfo],
    config: ParallelConfig,
    in_backward: InBackward,
) -> ShardUnit:
    trained = {parameter.dtype: parameter.name for parameter in reversed(members) if parameter.trainable}
    if len(trained) > 1:
        examples = ", ".join(f"{example} is {dtype}" for dtype, example in reversed(trained.items()))
        raise PlanError(
            f"The trained parameters of unit {name} have different storage ({examples}); FSDP2 reduces a unit in one "
            "dtype. Store them alike, or put them into units of their own (parallel.units)."
        )
    return ShardUnit(
        name=name,
        modules=modules,
        parameters=tuple(parameter.name for parameter in members),
        axis="shard",
        shard_dim=0,
        reshard=config.reshard,
        in_backward=in_backward,
        bytes_=sum(parameter.bytes_ for parameter in members),
        trainable=_count([parameter for parameter in members if parameter.trainable]),
    )


def _recompute(blocks: Sequence[str], config: ParallelConfig) -> dict[str, Recomputed]:
    match config.recompute:
        case FullRecompute():
            return dict.fromkeys(blocks, "full")
        case EveryKRecompute(k=k):
            return dict.fromkeys(blocks[::k], "full")
        case SelectiveRecompute():
            return dict.fromkeys(blocks, "selective")
        case _:
            return {}
