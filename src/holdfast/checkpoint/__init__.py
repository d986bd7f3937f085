"""Atomic, verified checkpoints for any training loop.

The public functions are `save`, `save_in_background`, `load`, `verify`, `rehearse` and `clean`; see `api.py`. They are
imported on first use, so that code which only reads manifests does not wait for the import of torch.distributed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.checkpoint import errors
    from holdfast.checkpoint.api import clean, load, rehearse, save, save_in_background, verify

__all__ = ["clean", "errors", "load", "rehearse", "save", "save_in_background", "verify"]

if not TYPE_CHECKING:  # a type checker would take any name for one of the package's

    def __getattr__(name: str) -> Any:
        if name == "errors":
            return importlib.import_module("holdfast.checkpoint.errors")
        if name in __all__:
            return getattr(importlib.import_module("holdfast.checkpoint.api"), name)
        raise AttributeError(f"module 'holdfast.checkpoint' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
