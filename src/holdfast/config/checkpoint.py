"""The `checkpoint` section: what is written while the run goes on and when it ends."""

from __future__ import annotations

from holdfast.config.base import Section


class CheckpointConfig(Section):
    """Exports are Hugging Face directories that plain transformers loads."""

    export_at_end: bool = True
    """Write `exports/final` when the run ends."""
    export_dtype: str = "same"
    """Dtype of exported floating-point tensors: `same` (as stored), float32 or bfloat16."""
    export_shard_bytes: int = 5_000_000_000
    """Largest safetensors file, unless a single tensor is larger."""
