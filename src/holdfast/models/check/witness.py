"""The witness: a model that transformers builds from the files' own configuration, run with the tensors of a run.

A run changes the configuration of its model, its attention and perhaps more; a check against that changed configuration
would find nothing. The witness is a second model, built from the configuration in the files and without parameters.
During a comparison, the attributes and the computed buffers of each of the run's modules are set to those of the
witness's module with the same name. Hooks, shards and adapters stay in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

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
    with ExitStack() as restore:
        for path, module in model.named_modules():
            lender = lenders.get(canonical_name(f"{path}.").removesuffix("."))
            # A wrapper has the name of what it wraps.
            if lender is None or not isinstance(module, type(lender)):
                continue
            restore.callback(_forget_others, module, {*vars(module), *module._buffers})  # noqa: SLF001 - to compare
            for name, value in _attributes(lender, device).items():
                if name in vars(module) or name in module._buffers:  # noqa: SLF001 - same
                    restore.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
            # A compiled block would be compiled anew for what is read here and never again.
            for name in ("_compiled_call_impl", "forward"):
                if name in vars(module):
                    restore.callback(vars(module).__setitem__, name, vars(module).pop(name))
        yield


def _forget_others(module: nn.Module, known: set[str]) -> None:
    """Delete what a forward pass within the block has left in a module, such as the longest text that it has seen."""
    for name in {*vars(module), *module._buffers} - known - _OF_EVERY_MODULE:  # noqa: SLF001 - to compare
        delattr(module, name)


def _attributes(lender: nn.Module, device: torch.device) -> dict[str, Any]:
    """Return what a module's constructor noted and computed, but for what leads to the lender's own modules."""
    computed = lender._non_persistent_buffers_set  # noqa: SLF001 - it has no reader
    buffers = {
        name: value.to(device, copy=True) for name, value in lender.named_buffers(recurse=False) if name in computed
    }
    noted = {name: value for name, value in vars(lender).items() if name not in _OF_EVERY_MODULE}
    return {name: value for name, value in noted.items() if not _leads_to_modules(value)} | buffers


def _leads_to_modules(value: Any) -> bool:
    if isinstance(value, nn.Module) or isinstance(getattr(value, "__self__", None), nn.Module):
        return True
    if isinstance(value, Mapping):
        return any(_leads_to_modules(member) for member in value.values())
    return isinstance(value, list | tuple) and any(_leads_to_modules(member) for member in value)
