"""Tells whether torch's variable-length kernel takes fewer key heads than query heads; that of torch 2.11 does not.

With torch 2.12 as the oldest this file goes, and with it the parameter `groups` of `attention.flash_call`.
"""

from __future__ import annotations

import inspect
from functools import cache

import torch


# Dynamo traces what a cache wraps, with a warning; a constant it asks for once.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's
def takes_groups() -> bool:
    """Return whether `varlen_attn` has the option `enable_gqa`."""
    return "enable_gqa" in _options()


@cache
def _options() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)
