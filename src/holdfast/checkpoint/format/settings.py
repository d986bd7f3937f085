"""The configuration that lies in a checkpoint, read as anybody's file is: bounded, and without running anything."""

from __future__ import annotations

from typing import Any

from holdfast.checkpoint.errors import CheckpointCorrupt
from holdfast.config.yaml12 import parse_text
from holdfast.errors import ConfigError


def settings_of(data: bytes, where: str) -> dict[str, Any]:
    """Return a tree of settings that `to_yaml` wrote.

    Raises:
        CheckpointCorrupt: The bytes are something else, although their hash may fit.
    """
    try:
        return parse_text(data.decode("utf-8"), where).values
    except (ConfigError, UnicodeDecodeError) as error:
        raise CheckpointCorrupt(f"{where} is not what a run writes: {error}") from error
