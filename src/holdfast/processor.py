"""This machine's processor: the cores that a process may use, and the dtypes that it multiplies."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter

_CGROUPS = Path("/sys/fs/cgroup")
_SIZE = 1024
"""Rows and columns of the matrices that are multiplied to compare dtypes."""
WORTH_IT = 1.2
"""Gain of bfloat16 from which it is advised."""
_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}
"""Flag of a processor -> the unit that multiplies bfloat16; the faster one first."""


def usable_cores(cgroups: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the cores that this process may use: those of its affinity, less what control groups leave out."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *map(int, _quotas(cgroups, own))]))


def _quotas(cgroups: Path, own: Path) -> list[float]:
    """Return the cores that each control group around this process may use, where it has a limit."""
    try:
        paths = [line.split(":", 2)[2].strip("/") for line in own.read_text().splitlines() if line.startswith("0::")]
    except (OSError, IndexError):
        paths = []
    found = []
    for path in paths or [""]:
        folder = cgroups / path
        for group in (folder, *folder.parents):
            if not group.is_relative_to(cgroups):
                break
            try:
                quota, period = (group / "cpu.max").read_text().split()
                found.append(int(quota) / int(period))
            except (OSError, ValueError, ZeroDivisionError):  # no limit, or no such file
                continue
    return found


def bfloat16_unit(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the unit that multiplies bfloat16; "" for a processor without one."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return next((name for flag, name in _UNITS.items() if flag in flags), "")


def bfloat16_gain() -> float:
    """Return how many times as fast a product of matrices is in bfloat16 as in float32, with this process's threads."""
    import torch

    wide = torch.randn(_SIZE, _SIZE, generator=torch.Generator().manual_seed(0))
    seconds: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    for _ in range(4):  # the first is not counted
        for dtype, found in seconds.items():
            matrix = wide.to(dtype)
            began = perf_counter()
            torch.mm(matrix, matrix)
            found.append(perf_counter() - began)
    return min(seconds[torch.float32][1:]) / min(seconds[torch.bfloat16][1:])
