"""Holdfast post-trains Hugging Face models on PyTorch FSDP2.

`holdfast.sft(config, rows=..., model=...)`, `holdfast.dpo(config, rows=...)`, `holdfast.reward(config, rows=...)`,
`holdfast.grpo(config, rows=..., rewards=...)` and `holdfast.distill(config, rows=...)` take the same trees as YAML
files, with live objects. `holdfast.checkpoint` saves and loads for loops of one's own. Names resolve on first use, so
importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast import checkpoint
    from holdfast.api import distill, dpo, grpo, reward, sft

__version__ = "0.1.0"
__all__ = ["__version__", "checkpoint", "distill", "dpo", "grpo", "reward", "sft"]


def __getattr__(name: str) -> Any:
    if name in {"distill", "dpo", "grpo", "reward", "sft"}:
        from holdfast.config.quiet import hush, leave_out_broken

        hush()
        leave_out_broken()
        from holdfast import api

        return getattr(api, name)
    if name == "checkpoint":
        return importlib.import_module("holdfast.checkpoint")
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
