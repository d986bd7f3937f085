"""The name under which models of transformers take and return a cache of keys and values.

It is `cache` since transformers 5.24, which warns of the older `past_key_values`. With 5.24 as the oldest this file
goes, and `cache` stands where it is called.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch import nn


def cache_argument(model: nn.Module, value: Any) -> dict[str, Any]:
    """Return a cache as the argument of a call of a model."""
    return {_name(type(model).forward): value}


def cache_of(output: Any) -> Any:
    """Return the cache that a model returned; None if it returned none."""
    return output.cache if hasattr(output, "cache") else getattr(output, "past_key_values", None)


@cache
def _name(forward: Any) -> str:
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
