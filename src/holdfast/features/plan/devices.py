"""Peak rates and memory of devices, taken from data sheets; nothing here was measured."""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.errors import ConfigError
from holdfast.metrics.throughput import PEAK_FLOPS

GIB = 2**30
NODE = 8
"""GPUs of a machine, joined by the fast links."""
BETWEEN_NODES = 50e9
"""Bytes per second of a GPU to another machine: a link of 400 Gbit/s each."""


@dataclass(frozen=True)
class Device:
    """The data sheet of one kind of device."""

    name: str
    memory: int
    """Bytes of device memory that a process can use."""
    bytes_per_second: float
    """Bandwidth of the device's memory."""
    link: float
    """Bytes per second to another GPU of the same machine, one way."""

    @property
    def flops(self) -> float:
        """Floating-point operations per second of dense products in bfloat16."""
        return PEAK_FLOPS[self.name.upper()]

    def wire(self, ranks: int) -> float:
        """Return the bytes per second that a rank sends at most among so many.

        What a ring sends to the next machine takes the links of all GPUs there; other messages stay inside.
        """
        return self.link if ranks <= NODE else min(self.link, NODE * BETWEEN_NODES)


DEVICES = {
    device.name: device
    for device in (
        Device("h100", 79 * GIB, 3.35e12, 450e9),
        Device("h200", 139 * GIB, 4.8e12, 450e9),
        Device("a100", 79 * GIB, 2.04e12, 300e9),
        Device("l40s", 44 * GIB, 0.864e12, 32e9),
        Device("b200", 178 * GIB, 8.0e12, 900e9),
    )
}
"""By name: data sheets of the SXM forms (of L40S, PCIe), in whole GiB of what is free of a new device."""

_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def device_named(name: str) -> Device:
    """Return a device.

    Raises:
        ConfigError: It is none of those whose peaks are stated here.
    """
    device = DEVICES.get(name.lower())
    if device is None:
        raise ConfigError(
            f"--device {name}: its peaks are not stated here. There are {', '.join(DEVICES)} and cpu; for another name "
            "the nearest, and say by --memory how much it has."
        )
    return device


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
