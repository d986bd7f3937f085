"""Canonical names of parameters, independent of the wrappers of checkpointing, compilation, adapters and FSDP2."""

from __future__ import annotations

import re

from torch import nn

POLICY_MODULE = "holdfast_policy"
"""Name under which `PolicyModel` registers the transformers model. It is unusual on purpose: the prefix is removed from
names, and a common name such as `language_model` occurs inside models (Llama 4, BLIP-2)."""
POLICY_PREFIX = f"{POLICY_MODULE}."

_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod|base_layer(?!\.(?:base_layer\.)*lora_))\.")
"""Parts of names that wrappers insert. A `base_layer` before `lora_` is kept: if one module has several stacks of
experts, peft nests their adapters, and only `base_layer` distinguishes them."""
_ADAPTER = re.compile(r"\.(lora_[AB]|lora_magnitude_vector)\.default\.")
"""peft's names of factors, which contain the name of the adapter, `default`."""


def canonical_name(name: str) -> str:
    """Return the name that transformers gives a parameter, without what wrappers and the root module add."""
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
