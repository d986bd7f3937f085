"""Add low-rank adapters to a model on the meta device.

peft inserts its modules; names, initial values and files are ours. A layer's matrix keeps the canonical name that it
has without an adapter. Its adapter's factors are named `LAYER.lora_A.weight` and `LAYER.lora_B.weight`, with DoRA also
`LAYER.lora_magnitude_vector.weight`.
"""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import torch

from holdfast.config.quiet import broken
from holdfast.config.sections.model import LoRAConfig
from holdfast.errors import ModelError
from holdfast.models.adapters.files import rank_patterns
from holdfast.models.adapters.live import (
    ADAPTER_NAME,
    adapters_of,
    is_linear,
    is_transposed,
    layers_of,
)
from holdfast.models.files.four_bit import quantise, row_bytes
from holdfast.models.heads.scorer import LAYER
from holdfast.models.names import named_parameters


def add_adapters(model: Any, section: LoRAConfig, storage: torch.dtype = torch.float32) -> str:
    """Freeze a model on the meta device and lay adapters beside its matrices; return a note for the user.

    Args:
        model: Of transformers; one that scores texts keeps its layer `score` trained.
        section: Which adapters.
        storage: Of frozen parameters.

    Raises:
        ModelError: A pattern matches nothing, no layer is left, or peft reads the model otherwise.
    """
    stacks, layers = _stacks(model, section), _targets(model, section)
    _refuse_idle(section.exclude, [*layers, *stacks], "exclude")
    stacks, layers = _without(stacks, section), _without(layers, section)
    if not layers and not stacks:
        raise ModelError("model.lora leaves no layer to adapt. Widen targets, or shorten exclude.")
    _refuse_idle(list(section.ranks), [*layers, *stacks], "ranks")
    targets, as_experts, refused = _as_peft_reads(model, layers)
    if section.targets != "all-linear":
        _refuse_unread(model, as_experts, refused)
    ranks = {path: _rank(path, section) for path in (*targets, *stacks)}
    model.requires_grad_(False)  # noqa: FBT003 - torch's own form
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # peft looks for a stack's rank among layers, and warns
        _inject(
            model,
            r=section.rank,
            lora_alpha=section.alpha,
            target_modules=targets,
            fan_in_fan_out=any(is_transposed(model.get_submodule(path)) for path in targets),
            target_parameters=stacks or None,
            lora_dropout=section.dropout,
            use_rslora=section.rank_stabilised,
            use_dora=section.dora,
            rank_pattern=rank_patterns(ranks, section),
        )
    _check_laid(model, {*(f"{path}.weight" for path in targets), *stacks})
    _train_whole(model, section)
    parameters = sum(value.numel() for value in model.parameters() if value.requires_grad)
    unread = {"takes for experts": as_experts, "refuses in this architecture": refused}
    left_out = "".join(
        f"; {len(paths)} left out, which peft {does} ({_first_of(paths)})" for does, paths in unread.items() if paths
    )
    layer_counts = [f"{len(targets)} layers"] * bool(targets) + [f"{len(stacks)} stacks of experts"] * bool(stacks)
    name = "lora (DoRA)" if section.dora else "lora"
    note = f"{name}: rank {section.rank} on {' and '.join(layer_counts)}, {parameters:,} parameters trained{left_out}"
    if reason := broken("bitsandbytes"):  # peft would import it
        note += f"; {reason} and is not used"
    return note if section.quantize is None else f"{note}; {_quantised(model, section, storage)}"


def _inject(model: Any, **settings: Any) -> None:
    broken("bitsandbytes")  # peft imports it, and would fail with it
    from peft import LoraConfig, inject_adapter_in_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # it is each layer's, and peft has one for all
        inject_adapter_in_model(LoraConfig(**settings), model, adapter_name=ADAPTER_NAME, low_cpu_mem_usage=True)


def _quantised(model: Any, section: LoRAConfig, storage: torch.dtype) -> str:
    assert section.quantize is not None
    layers = quantise(model, section.quantize, storage)
    numbers = sum(layer.in_features * layer.out_features for layer in layers)
    bits = 8 * sum(row_bytes(layer.in_features) * layer.out_features for layer in layers) / numbers
    return (
        f"{len(layers)} frozen layers in {section.quantize}, {numbers:,} numbers of {bits:.2g} bits, sharded by rows "
        "like all others; an export expands them"
    )


def _first_of(paths: list[str]) -> str:
    return f"{paths[0]} and {len(paths) - 1} more" if len(paths) > 1 else paths[0]


def _refuse_unread(model: Any, as_experts: list[str], refused: list[str]) -> None:
    """Refuse layers that a pattern names and peft does not adapt.

    Raises:
        ModelError: A pattern names such a layer.
    """
    kind = model.config.model_type
    if as_experts:
        raise ModelError(
            f"model.lora.targets: peft takes {_first_of(as_experts)} for experts of {kind}, and could not read their "
            "adapters. Leave them out by model.lora.exclude."
        )
    if refused:
        raise ModelError(
            f"model.lora.targets: peft refuses {_first_of(refused)}: the kernels of {kind} read such matrices past any "
            f"adapter. Leave them out by model.lora.exclude: [{refused[0].rpartition('.')[2]}]."
        )


def _as_peft_reads(model: Any, targets: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the layers that peft adapts under their own names, those that it takes for experts, and those it refuses.

    Of some mixtures of experts peft reads a path that ends like an expert's matrix in older releases of transformers as
    all experts together (shared experts and dense blocks have such paths), and would read our adapters so too. Of
    models with Mamba layers it refuses matrices by the last part of their names.
    """
    adapted, _ = _tried(model, targets)
    if adapted is not None:
        return [path for path in targets if path in adapted], [path for path in targets if path not in adapted], []
    refused = []
    for name in dict.fromkeys(path.rpartition(".")[2] for path in targets):
        alike = [path for path in targets if path.rpartition(".")[2] == name]
        refused += alike if _tried(model, alike)[0] is None else []
    remaining = [path for path in targets if path not in refused]
    adapted, why = _tried(model, remaining)
    if adapted is None:
        raise ModelError(f"model.lora.targets: peft refuses these layers together: {why}")
    return [path for path in remaining if path in adapted], [path for path in remaining if path not in adapted], refused


def _tried(model: Any, targets: list[str]) -> tuple[set[str] | None, str]:
    """Return the layers that peft adapts if told to adapt these; None, and why, if it refuses."""
    if not targets:
        return set(), ""
    trial = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            _inject(trial, r=1, target_modules=list(targets))
        except ValueError as error:
            return None, str(error)
    return {path for path, layer in layers_of(trial) if is_linear(layer.base_layer)}, ""


def _check_laid(model: Any, expected: set[str]) -> None:
    """Refuse adapters if peft adapted other layers than it was told to.

    Raises:
        ModelError: The layers differ. The message names one.
    """
    laid = set(adapters_of(model))
    if laid != expected:
        different = sorted(laid ^ expected)[0]
        how = "takes in" if different in laid else "leaves out"
        raise ModelError(f"model.lora: peft {how} {different} of {model.config.model_type}, against what it was told.")


def _targets(model: Any, section: LoRAConfig) -> list[str]:
    """Return the paths of the layers that get an adapter, but for those that are excluded."""
    outputs = [model.get_output_embeddings(), getattr(model, "score", None)]
    linear = {
        path: layer
        for path, layer in model.named_modules()
        if is_linear(layer) and not any(layer is output for output in outputs)
    }
    if section.targets == "all-linear":
        inside = {id(layer) for layer in model.get_decoder().modules()}
        return [path for path, layer in linear.items() if id(layer) in inside]
    return _matching("targets", section.targets, list(linear), "linear layer")


def _stacks(model: Any, section: LoRAConfig) -> list[str]:
    """Return the names of the stacks of experts that get adapters, but for those that are excluded."""
    if section.experts == []:
        return []
    names = [name for name, value in named_parameters(model).items() if ".experts." in name and value.ndim == 3]
    if not names:
        raise ModelError(
            f"model.lora.experts: {model.config.model_type} has no matrices of experts in stacks. Leave it out; "
            "experts that are layers of their own are named by targets."
        )
    return names if section.experts == "all" else _matching("experts", section.experts, names, "stack of experts")


def _matching(key: str, patterns: list[str], names: list[str], kind: str) -> list[str]:
    matches: dict[str, None] = {}
    for pattern in patterns:
        matched = [name for name in names if re.search(pattern, name)]
        if not matched:
            raise ModelError(
                f"model.lora.{key}: {pattern!r} matches no {kind}. They look like {', '.join(sorted(names)[:3])}."
            )
        matches |= dict.fromkeys(matched)
    return list(matches)


def _refuse_idle(patterns: list[str], names: list[str], key: str) -> None:
    """Refuse patterns that match none of the names; each is probably a mistake.

    Raises:
        ModelError: A pattern matches none.
    """
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            raise ModelError(
                f"model.lora.{key}: {pattern!r} matches nothing that would get an adapter. Such are "
                f"{', '.join(sorted(names)[:3])}."
            )


def _without(names: list[str], section: LoRAConfig) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in section.exclude)]


def _rank(path: str, section: LoRAConfig) -> int:
    return next((rank for pattern, rank in section.ranks.items() if re.search(pattern, path)), section.rank)


def _train_whole(model: Any, section: LoRAConfig) -> None:
    parameters = named_parameters(model)
    if LAYER in parameters:  # a reward model's, which files of a language model lack: it starts at random
        parameters[LAYER].requires_grad_(True)  # noqa: FBT003 - torch's own form
    for pattern in section.train:
        matched = [value for name, value in parameters.items() if re.search(pattern, name)]
        if not matched:
            raise ModelError(f"model.lora.train: {pattern!r} matches no parameter.")
        for value in matched:
            value.requires_grad_(True)  # noqa: FBT003 - torch's own form
    matrices = {name: value for name, value in parameters.items() if value.ndim > 1 and ".lora_" not in name}
    if section.train and all(value.requires_grad for name, value in matrices.items() if name != LAYER):
        raise ModelError(
            f"model.lora.train: {section.train} leaves no matrix of the model frozen, and beside trained ones adapters "
            f"add nothing. Name fewer parameters (they look like {', '.join(sorted(matrices)[:3])}), or leave "
            "model.lora out to train the whole model."
        )
