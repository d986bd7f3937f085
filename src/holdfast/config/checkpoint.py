"""The `checkpoint` section: what is written while the run goes on and when it ends."""

from __future__ import annotations

from typing import Literal

from holdfast.config.base import PositiveInt, Section


class CheckpointConfig(Section):
    """Exports are Hugging Face directories that plain transformers loads."""

    export_at_end: bool = True
    """Write `exports/final` when the run ends."""
    export_dtype: Literal["same", "float32", "bfloat16"] = "same"
    """Dtype of exported floating-point tensors; `same`: as they are stored."""
    export_shard_bytes: PositiveInt = 5_000_000_000
    """Largest safetensors file, unless a single tensor is larger."""
