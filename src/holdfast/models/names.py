"""One spelling for every parameter, whatever wraps its module."""

from __future__ import annotations

import re

from torch import nn

POLICY_MODULE = "holdfast_policy"
"""Under which `PolicyModel` registers the transformers model: no model has a module of this name, and several have a
`language_model` of their own (Llama 4, BLIP-2), whose name is not to be cut."""
POLICY_PREFIX = f"{POLICY_MODULE}."

_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod|base_layer(?!\.(?:base_layer\.)*lora_))\.")
"""peft nests the adapters of several stacks of one module, and tells them apart by a `base_layer` before them."""
_ADAPTER = re.compile(r"\.(lora_[AB]|lora_magnitude_vector)\.default\.")
"""peft keeps a layer inside its adapter, and adapters by name."""


def canonical_name(name: str) -> str:
    """Return the name transformers gives a parameter, without the marks of checkpointing, compiling, adapters, root."""
    return _ADAPTER.sub(r".\1.", _WRAPPERS.sub("", name)).removeprefix(POLICY_PREFIX)


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by canonical name; of tied ones, the first."""
    return {canonical_name(name): parameter for name, parameter in module.named_parameters()}


def tied_names(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return, for each parameter that has several names, its first name and the others."""
    by_identity: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), []).append(canonical_name(name))
    return {names[0]: tuple(names[1:]) for names in by_identity.values() if len(names) > 1}
