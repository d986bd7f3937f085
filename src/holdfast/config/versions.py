"""The versions that decide a run's numbers; found without importing what they are of."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

LIBRARIES = ("holdfast", "torch", "transformers", "datasets", "safetensors", "tokenizers", "numpy", "peft")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that decide numbers."""
    installed = {"python": platform.python_version(), "platform": platform.platform()}
    for name in LIBRARIES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed
