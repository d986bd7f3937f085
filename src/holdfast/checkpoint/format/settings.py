"""Read the configuration that a checkpoint contains, with a size limit and without executing anything."""

from __future__ import annotations

from typing import Any

from holdfast.checkpoint.errors import CheckpointCorrupt
from holdfast.config.yaml12 import parse_text
from holdfast.errors import ConfigError

_NEEDED = (("run", "name"), ("model", None), ("checkpoint", "keep"))
"""Sections, and keys in them, that are read of a checkpoint's configuration."""


def settings_of(data: bytes, path: str) -> dict[str, Any]:
    """Return a tree of settings that `to_yaml` wrote.

    Raises:
        CheckpointCorrupt: The bytes are something else, although their hash may fit.
    """
    try:
        values = parse_text(data.decode("utf-8"), path).values
    except (ConfigError, UnicodeDecodeError) as error:
        raise CheckpointCorrupt(f"{path} is not what a run writes: {error}") from error
    for section, key in _NEEDED:
        inner = values.get(section)
        if not isinstance(inner, dict) or (key is not None and key not in inner):
            name = section if key is None else f"{section}.{key}"
            raise CheckpointCorrupt(f"{path} is not what a run writes, although its hash may fit: it lacks {name}.")
    return values
