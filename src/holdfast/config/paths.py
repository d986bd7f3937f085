"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path


def expanded(path: str) -> Path:
    """Return a path with `~` or `~name` replaced by that home; as it is where nobody has that name."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
