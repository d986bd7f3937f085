"""The witness: a model that transformers builds from the files' own configuration, run with the tensors of a run.

A run changes the configuration of its model, its attention and perhaps more; a check against that changed configuration
would find nothing. The witness is a second model, built from the configuration in the files and without parameters.
During a comparison, each module of the run's model takes over the attributes and the computed buffers of the witness's
module with the same name. Hooks, shards and adapters stay in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.models.files.configuration import with_buffers
from holdfast.models.files.vision import set_attention
from holdfast.models.layers.attention import upstream_attention
from holdfast.models.names import canonical_name

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes of every nn.Module: parameters, buffers, sub-modules, hooks, the training flag."""


def witness_of(kind: Any, files: Any) -> Any:
    """Return a model without parameters, as transformers builds it from a configuration.

    Args:
        kind: transformers' class.
        files: The configuration as the files have it, with a user's overrides; it is copied.
    """
    return with_buffers(kind._from_config, files)  # noqa: SLF001 - what from_config calls


def follow_implementation(witness: Any, model: Any) -> None:
    """Let a witness attend by transformers' own exact attention, and compute experts as the model does."""
    set_attention(witness, upstream_attention(witness))
    experts = getattr(model.config, "_experts_implementation", None)
    if experts is not None and experts != getattr(witness.config, "_experts_implementation", None):
        witness.set_experts_implementation(experts)


@contextmanager
def as_files_say(model: nn.Module, witness: nn.Module, device: torch.device) -> Iterator[None]:
    """Let a model be what its files describe within the block; its parameters and what is stored stay its own.

    A backward pass belongs inside too: recomputed blocks read the attributes again.

    Args:
        model: Sharded, perhaps with adapters.
        witness: From `witness_of`.
        device: Where buffers belong.
    """
    lenders = dict(witness.named_modules())
    before: list[tuple[nn.Module, dict[str, Any], dict[str, Tensor | None]]] = []
    try:
        for path, module in model.named_modules():
            lender = lenders.get(canonical_name(f"{path}.").removesuffix("."))
            # A wrapper has the name of what it wraps.
            if lender is None or not isinstance(module, type(lender)):
                continue
            before.append((module, dict(vars(module)), dict(module._buffers)))  # noqa: SLF001 - to put them back
            vars(module).update(_attributes(lender))
            # A compiled block would be compiled anew for what is read here and never again.
            for name in ("_compiled_call_impl", "forward"):
                vars(module).pop(name, None)
            for name in lender._non_persistent_buffers_set & module._buffers.keys():  # noqa: SLF001 - it has no reader
                value = lender._buffers[name]  # noqa: SLF001 - same
                module._buffers[name] = None if value is None else value.to(device, copy=True)  # noqa: SLF001 - same
        yield
    finally:
        for module, attributes, buffers in before:
            _restore(module, attributes, buffers)


def _attributes(lender: nn.Module) -> dict[str, Any]:
    """Return what a module's constructor noted, but for what leads to the lender's own modules."""
    return {
        name: value
        for name, value in vars(lender).items()
        if name not in _OF_EVERY_MODULE and not _leads_to_modules(value)
    }


def _leads_to_modules(value: Any) -> bool:
    if isinstance(value, nn.Module) or isinstance(getattr(value, "__self__", None), nn.Module):
        return True
    if isinstance(value, Mapping):
        return any(_leads_to_modules(member) for member in value.values())
    return isinstance(value, list | tuple) and any(_leads_to_modules(member) for member in value)


def _restore(module: nn.Module, attributes: dict[str, Any], buffers: dict[str, Tensor | None]) -> None:
    namespace = vars(module)
    module_state = {
        name: namespace[name] for name in _OF_EVERY_MODULE if name in namespace
    }  # FSDP2 adds hooks while it runs
    namespace.clear()
    namespace.update(attributes | module_state)
    module._buffers.clear()  # noqa: SLF001 - a forward pass may have registered some anew
    module._buffers.update(buffers)  # noqa: SLF001 - same
