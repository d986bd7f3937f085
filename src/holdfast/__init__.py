"""Holdfast post-trains Hugging Face models on PyTorch FSDP2.

`holdfast.sft(config, rows=..., model=...)` takes the same tree as the YAML file, with live objects. Names resolve on
first use, so importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.api import sft

__version__ = "0.1.0"
__all__ = ["__version__", "sft"]


def __getattr__(name: str) -> Any:
    if name == "sft":
        from holdfast.api import sft

        return sft
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
