"""Memory of devices, taken from data sheets; nothing here was measured."""

from __future__ import annotations

import re

from holdfast.errors import ConfigError

GIB = 2**30
DEVICES = {"h100": 79 * GIB, "h200": 139 * GIB, "a100": 79 * GIB, "l40s": 44 * GIB, "b200": 178 * GIB}
"""Name of a device -> bytes that a process can use of a new one, in whole GiB."""
_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def memory_of(name: str) -> int:
    """Return the memory of a device, in bytes.

    Raises:
        ConfigError: It is none of those whose memory is stated here.
    """
    if name not in DEVICES:
        raise ConfigError(
            f"--device {name}: its memory is not stated here. There are {', '.join(DEVICES)} and cpu; for another name "
            "the nearest, and say by --memory how much it has."
        )
    return DEVICES[name]


def bytes_of(amount: str) -> int:
    """Return the bytes that words like 80GiB or 24 GB mean.

    Raises:
        ConfigError: They mean none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", amount)
    unit = None if match is None else _UNITS.get(match[2].lower())
    if match is None or unit is None or float(match[1]) <= 0:
        raise ConfigError(f"--memory {amount}: this is no amount of memory. Write it like 80GiB or 24GB.")
    return int(float(match[1]) * unit)
