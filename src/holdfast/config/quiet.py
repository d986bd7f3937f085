"""Prepares the import of transformers: silences other packages, and leaves out a torchvision that cannot work.

transformers imports torchvision wherever it is installed, and fails with it. Nothing here uses it.
"""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Callable

from holdfast.config.versions import installed

_TALK_ON_IMPORT = ("torchao", "torch.utils._pytree", "bitsandbytes")
"""transformers imports torchao and peft bitsandbytes wherever they are installed; they tell of kernels that are not."""
_TORCHVISION_BEHIND = 15
"""torchvision 0.(N + 15) belongs to torch 2.N."""


def hush() -> str:
    """Set their loggers to errors only, and hide an unfit torchvision; call it before transformers is imported.

    Returns:
        What is left out and why; "" if nothing.
    """
    for name in _TALK_ON_IMPORT:
        logging.getLogger(name).setLevel(logging.ERROR)
    reason = unfit_torchvision()
    if reason and "torchvision" not in sys.modules:
        sys.modules["torchvision"] = None  # type: ignore[assignment]  # for Python, and so for transformers: there is none
    return reason


_BROKEN: dict[str, str] = {}
"""Name to why, of packages that are hidden."""


def broken(name: str) -> str:
    """Import an optional package, which another one imports wherever it is installed; hide it where that fails.

    Returns:
        Why it cannot be imported; "" where it can, or is not installed.
    """
    number = installed(name)
    if number is not None and name not in _BROKEN:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - what a package raises that was built for another torch
            sys.modules[name] = None  # type: ignore[assignment]
            _BROKEN[name] = f"{name} {number} cannot be imported ({type(error).__name__}: {error})"
    return _BROKEN.get(name, "")


def unfit_torchvision(installed: Callable[[str], str | None] = installed) -> str:
    """Return why the installed torchvision cannot work with the installed torch; "" where it may, or there is none."""
    torch, torchvision = installed("torch"), installed("torchvision")
    if torch is None or torchvision is None:
        return ""
    # Builds of one's own name a commit there, which says nothing.
    builds = [re.findall(r"\+(cpu|cu\d+|rocm[\d.]+)$", text) for text in (torch, torchvision)]
    fits = int(torchvision.split(".")[1]) == int(torch.split(".")[1]) + _TORCHVISION_BEHIND
    return (
        ""
        if fits and not (all(builds) and builds[0] != builds[1])
        else f"torchvision {torchvision} is not of torch {torch}"
    )
