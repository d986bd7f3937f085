"""Modules that are trained whole beside adapters: what peft calls modules_to_save."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from holdfast.models.adapters.live import adapters_of
from holdfast.models.names import canonical_name, named_parameters, tied_names


def whole_modules(model: nn.Module) -> dict[str, list[str]] | None:
    """Return the modules that are trained whole in a model with adapters, each with the names of its parameters.

    Returns:
        Canonical names; None where peft's files could not hold what is trained: part of a module only, such as the bias
        of a layer whose matrix is frozen, a module with a stored buffer, which is no weight of ours to export, or one
        that is tied to another, which peft would part.
    """
    trained = _trained_whole(model)
    modules = _outermost({name.rpartition(".")[0] for name in trained})
    parameters_of = {path: _below(path, named_parameters(model)) for path in modules}
    covered = {name for names in parameters_of.values() for name in names}
    apart = any(_below(path, (*_tied(model), *_stored_buffers(model))) for path in modules)
    return None if covered != trained or apart else parameters_of


def _trained_whole(model: nn.Module) -> set[str]:
    adapters = {name for adapter in adapters_of(model).values() for name in adapter.names}
    return {name for name, value in named_parameters(model).items() if value.requires_grad} - adapters


def _outermost(paths: set[str]) -> list[str]:
    return sorted(path for path in paths if not any(path.startswith(f"{other}.") for other in paths))


def _below(path: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(f"{path}.")]


def _tied(model: nn.Module) -> list[str]:
    return [name for first, others in tied_names(model).items() for name in (first, *others)]


def _stored_buffers(model: nn.Module) -> list[str]:
    return [
        canonical_name(f"{path}.{name}")
        for path, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    ]
