"""Prepares the import of transformers: silences other packages, and leaves out a torchvision that cannot work.

transformers imports torchvision wherever it is installed, and fails with it. Nothing here uses it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import sys
import warnings
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
    if name not in _BROKEN and sys.modules.get(name, name) is not None and importlib.util.find_spec(name) is not None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - what a package raises that was built for another torch
            sys.modules[name] = None  # type: ignore[assignment]
            number = installed(name) or "of an unknown version"
            _BROKEN[name] = f"{name} {number} cannot be imported ({type(error).__name__}: {error})"
    return _BROKEN.get(name, "")


def leave_out_broken() -> list[str]:
    """Hide what transformers imports wherever it is installed and cannot be imported; call it before transformers is.

    It imports torch where one of them is installed.

    Returns:
        What is left out and why.
    """
    return [f"{reason} and is left out" for name in ("torchvision", "torchao") if (reason := broken(name))]


def unfit_torchvision(installed: Callable[[str], str | None] = installed) -> str:
    """Return why the installed torchvision cannot work with the installed torch; "" where it may, or there is none."""
    torch, torchvision = installed("torch"), installed("torchvision")
    if torch is None or torchvision is None:
        return ""
    from packaging.version import InvalidVersion, Version

    try:
        numbers = [Version(text) for text in (torch, torchvision)]
    except InvalidVersion:
        return ""  # its import tells
    # Builds of one's own name a commit there, which says nothing.
    builds = [re.fullmatch(r"cpu|cu\d+|rocm[\d.]+", number.local or "") for number in numbers]
    differ = all(builds) and numbers[0].local != numbers[1].local
    fits = numbers[1].release[:2] == (0, numbers[0].minor + _TORCHVISION_BEHIND)
    return "" if fits and not differ else f"torchvision {torchvision} is not of torch {torch}"
