"""What a run leaves on disk, as a library for any loop: `save`, `save_in_background`, `load`, `verify`, `rehearse`."""

from holdfast.checkpoint.interface import load, rehearse, save, verify
from holdfast.checkpoint.pending import save_in_background

__all__ = ["load", "rehearse", "save", "save_in_background", "verify"]
