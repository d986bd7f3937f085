"""What a run leaves on disk, as a library for any loop: `save`, `save_in_background`, `load`, `verify`, `rehearse`,
`clean`."""

from holdfast.checkpoint.interface import clean, load, rehearse, save, save_in_background, verify

__all__ = ["clean", "load", "rehearse", "save", "save_in_background", "verify"]
