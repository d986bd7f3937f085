"""The check of `holdfast doctor` on compilers: whether what builds kernels and blocks for a GPU is on this machine."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from holdfast.config.sections.launch import LaunchConfig
from holdfast.features.plan.checks.findings import Finding, ok, warn

_FIX = (
    "Install gcc, g++ and Python's headers (Debian: apt-get install gcc g++ python3-dev); runs go on without, slower."
)


def look_at_compilers(launch: LaunchConfig) -> Iterator[Finding]:
    """Look for compilers where a GPU is used; elsewhere a run needs none."""
    import torch

    if torch.cuda.is_available() and launch.device != "cpu":
        headers = Path(sysconfig.get_path("include")) / "Python.h"
        here = {name: shutil.which(name) is not None for name in ("gcc", "g++")}
        yield graded({**here, str(headers): headers.exists()})


def graded(here: Mapping[str, bool]) -> Finding:
    """Return a finding on tools, by whether each is here."""
    lacking = [name for name, there in here.items() if not there]
    if lacking:
        return warn("compilers", f"{', '.join(lacking)} not found: kernels and blocks cannot be built", _FIX)
    return ok("compilers", f"{', '.join(here)} found")
