"""What a run leaves on disk, as a library for any loop: `save`, `load`, `verify`, `rehearse`."""

from holdfast.checkpoint.interface import load, rehearse, save, verify

__all__ = ["load", "rehearse", "save", "verify"]
