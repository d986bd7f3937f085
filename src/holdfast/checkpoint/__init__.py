"""What a run leaves on disk, as a library for any loop: `save`, `save_in_background`, `load`, `verify`, `rehearse`,
`clean`.

The names resolve on first use: whoever only reads headers does not wait for what distributed tensors import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.checkpoint.interface import clean, load, rehearse, save, save_in_background, verify

__all__ = ["clean", "load", "rehearse", "save", "save_in_background", "verify"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from holdfast.checkpoint import interface

        return getattr(interface, name)
    raise AttributeError(f"module 'holdfast.checkpoint' has no attribute {name!r}")
