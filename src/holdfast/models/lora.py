"""Low-rank adapters: where they sit, how they start, and what their layer's matrix is with them.

peft lays the modules in; names, values and files are ours. A layer's matrix keeps the name it has without an adapter
(`canonical_name`), and its adapter stands beside it as `LAYER.lora_A.weight` and `LAYER.lora_B.weight`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from holdfast.config.lora import LoRAConfig
from holdfast.errors import ModelError
from holdfast.models.conversion import Header
from holdfast.models.names import canonical_name, named_parameters
from holdfast.models.safetensors_files import read_header
from holdfast.models.weights_in import Rows, WeightGroup, WeightSource

NAME = "default"
"""What peft calls our one adapter."""

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
"""What peft calls its two files."""

PEFT_PREFIX = "base_model.model."
"""What peft's files put before a name."""


class Adapter(NamedTuple):
    """One layer's adapter, by canonical names."""

    a: str
    """[rank, in]"""
    b: str
    """[out, rank]"""
    scale: float


def add_adapters(model: Any, section: LoRAConfig) -> str:
    """Freeze a model on the meta device and lay adapters beside its matrices; return a note for the user.

    Raises:
        ModelError: A pattern matches nothing, or no layer is left.
    """
    targets, others = _as_peft_reads(model, _targets(model, section))
    if others and section.targets != "all-linear":
        raise ModelError(
            f"model.lora.targets: peft takes {others[0]}{_more(others)} for experts of {model.config.model_type}, and "
            "could not read their adapters. Leave them out by model.lora.exclude."
        )
    ranks = {path: _rank(path, section) for path in targets}
    model.requires_grad_(False)  # noqa: FBT003 - torch's own form
    _inject(
        model,
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules=targets,
        lora_dropout=section.dropout,
        use_rslora=section.rank_stabilised,
        rank_pattern={f"^{re.escape(path)}$": rank for path, rank in ranks.items() if rank != section.rank},
    )
    _train_whole(model, section)
    parameters = sum(value.numel() for value in model.parameters() if value.requires_grad)
    left_out = f"; {len(others)} left out, which peft takes for experts ({others[0]}{_more(others)})" if others else ""
    return f"lora: rank {section.rank} on {len(targets)} layers, {parameters:,} parameters trained{left_out}"


def _inject(model: Any, **settings: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(**settings), model, adapter_name=NAME, low_cpu_mem_usage=True)


def _more(paths: list[str]) -> str:
    return f" and {len(paths) - 1} more" if len(paths) > 1 else ""


def _as_peft_reads(model: Any, targets: list[str]) -> tuple[list[str], list[str]]:
    """Return the layers that peft adapts under their own names, and those that it takes for something else.

    Of some mixtures of experts peft reads a path that ends like an expert's matrix in older releases of transformers as
    all experts together (shared experts and dense blocks have such paths), and would read our adapters so too.
    """
    trial = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            _inject(trial, r=1, target_modules=list(targets))
        except ValueError as error:
            raise ModelError(f"model.lora: peft refuses these layers: {error}") from error
    found = {path for path, layer in _layers(trial) if isinstance(layer.base_layer, nn.Linear)}
    return [path for path in targets if path in found], [path for path in targets if path not in found]


def _targets(model: Any, section: LoRAConfig) -> list[str]:
    """Return the paths of the layers that get an adapter."""
    output = model.get_output_embeddings()
    linear = {
        path: layer for path, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not output
    }
    if section.targets == "all-linear":
        inside = {id(layer) for layer in model.get_decoder().modules()}
        chosen = [path for path, layer in linear.items() if id(layer) in inside]
    else:
        chosen = list(dict.fromkeys(path for pattern in section.targets for path in _matching(pattern, list(linear))))
    kept = [path for path in chosen if not any(re.search(pattern, path) for pattern in section.exclude)]
    if not kept:
        raise ModelError("model.lora leaves no layer to adapt. Widen targets, or shorten exclude.")
    return kept


def _matching(pattern: str, paths: list[str]) -> list[str]:
    matched = [path for path in paths if re.search(pattern, path)]
    if not matched:
        raise ModelError(
            f"model.lora.targets: {pattern!r} matches no linear layer. They look like {', '.join(sorted(paths)[:3])}."
        )
    return matched


def _rank(path: str, section: LoRAConfig) -> int:
    return next((rank for pattern, rank in section.ranks.items() if re.search(pattern, path)), section.rank)


def _train_whole(model: Any, section: LoRAConfig) -> None:
    parameters = named_parameters(model)
    for pattern in section.train:
        matched = [value for name, value in parameters.items() if re.search(pattern, name)]
        if not matched:
            raise ModelError(f"model.lora.train: {pattern!r} matches no parameter.")
        for value in matched:
            value.requires_grad_(True)  # noqa: FBT003 - torch's own form


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """Return the adapter of each adapted matrix, by the matrix's canonical name; empty without adapters."""
    found = {}
    for path, layer in _layers(model):
        name = canonical_name(f"{path}." if path else "")
        found[f"{name}weight"] = Adapter(f"{name}lora_A.weight", f"{name}lora_B.weight", float(layer.scaling[NAME]))
    return found


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield path, module


def scale_of(section: LoRAConfig, rank: int) -> float:
    """Return the factor of B A for an adapter of some rank."""
    return section.alpha / (math.sqrt(rank) if section.rank_stabilised else rank)


def merged(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W + scale B A in the dtype of W, computed in float32 or better.

    Args:
        base: [out, in]
        a: [rank, in]
        b: [out, rank]
        scale: Of the product.
    """
    wide = torch.promote_types(torch.promote_types(base.dtype, a.dtype), torch.float32)
    return torch.addmm(base.to(wide), b.to(wide), a.to(wide), alpha=scale).to(base.dtype)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let the model compute as if it had no adapters: the frozen model, bit for bit."""
    layers = [layer for _, layer in _layers(model)]
    for layer in layers:
        layer._disable_adapters = True  # noqa: SLF001 - its public form also changes requires_grad
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # noqa: SLF001 - as above


@dataclass(frozen=True)
class AdapterFile:
    """Adapters in peft's format."""

    path: Path
    headers: Mapping[str, Header]

    @classmethod
    def at(cls, directory: Path) -> AdapterFile:
        """Open a directory that peft, or an export of ours, wrote.

        Raises:
            ModelError: It holds no adapter.
        """
        path = directory / WEIGHTS
        if not path.exists():
            raise ModelError(f"model.lora.path: {directory} has no {WEIGHTS}. Name a directory in peft's format.")
        return cls(path, read_header(path))

    def read(self, name: str, part: slice) -> Tensor:
        """Return some rows of a tensor."""
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            rows: Tensor = file.get_slice(name)[part]
        return rows


@dataclass(frozen=True)
class AdapterSource:
    """A model's tensors, and behind them its adapters: A uniform within 1 / sqrt(in), B zero, or from a directory."""

    base: WeightSource
    headers: Mapping[str, Header]
    seed: int
    stored: AdapterFile | None

    @classmethod
    def of(
        cls, base: WeightSource, model: nn.Module, section: LoRAConfig, seed: int, directory: Path | None
    ) -> AdapterSource:
        """Plan the adapters of a model.

        Raises:
            ModelError: The directory's adapters are others than the model's.
        """
        names = [name for adapter in adapters_of(model).values() for name in (adapter.a, adapter.b)]
        parameters = named_parameters(model)
        headers = {name: Header(tuple(parameters[name].shape), torch.float32) for name in names}
        stored = None if directory is None else AdapterFile.at(directory)
        if stored is not None:
            _refuse_others(headers, stored, str(section.path))
        return cls(base, headers, seed, stored)

    def groups(self) -> Iterator[WeightGroup]:
        """Yield the model's groups, then one per adapter tensor."""
        yield from self.base.groups()
        for name, header in self.headers.items():
            yield _Start(name, header, self.seed, self.stored)


def _refuse_others(headers: Mapping[str, Header], stored: AdapterFile, path: str) -> None:
    there = {name.removeprefix(PEFT_PREFIX): header.shape for name, header in stored.headers.items()}
    here = {name: header.shape for name, header in headers.items()}
    if there != here:
        different = sorted(name for name in {*there, *here} if there.get(name) != here.get(name))
        raise ModelError(
            f"model.lora.path {path} holds other adapters than model.lora describes, first at {different[0]}: "
            f"{there.get(different[0], 'none')} there, {here.get(different[0], 'none')} here. Set rank and targets as "
            "they were."
        )


@dataclass(frozen=True)
class _Start:
    name: str
    header: Header
    seed: int
    stored: AdapterFile | None

    @property
    def targets(self) -> Mapping[str, Header]:
        return {self.name: self.header}

    def load(self, rows: Rows) -> dict[str, Tensor]:
        part = rows[self.name]
        if self.stored is not None:
            return {self.name: self.stored.read(PEFT_PREFIX + self.name, part)}
        if ".lora_B." in self.name:
            return {self.name: torch.zeros(self.header.shape)[part]}
        digest = hashlib.sha256(f"{self.seed}:{self.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        bound = 1.0 / math.sqrt(self.header.shape[1])
        drawn = torch.empty(self.header.shape).uniform_(-bound, bound, generator=generator)
        return {self.name: drawn[part]}


def adapter_ranks(model: nn.Module) -> dict[str, int]:
    """Return the rank of each adapter by its layer's path."""
    parameters = named_parameters(model)
    return {
        name.removesuffix(".weight"): int(parameters[adapter.a].shape[0])
        for name, adapter in adapters_of(model).items()
    }


def peft_settings(ranks: Mapping[str, int], section: LoRAConfig, base: str) -> str:
    """Return adapter_config.json, by which peft loads adapters onto the model in `base`.

    Args:
        ranks: Of each adapter, by its layer's path.
        section: The run's.
        base: A directory or a name on the hub.
    """
    from peft import LoraConfig

    settings = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules=sorted(ranks),
        lora_dropout=section.dropout,
        use_rslora=section.rank_stabilised,
        rank_pattern={f"^{re.escape(path)}$": rank for path, rank in ranks.items() if rank != section.rank},
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    values = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.to_dict().items()}
    return json.dumps(values, indent=2, sort_keys=True, default=str) + "\n"
