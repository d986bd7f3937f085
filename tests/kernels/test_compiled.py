"""Triton's compiler takes the kernel that reads blocks in place, for cards that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.models.chunks.kernel_form import why_no_triton

if why_no_triton():
    pytest.skip("needs Triton: make test-kernels", allow_module_level=True)

SMALLEST = 99 * 1024
"""Shared memory of a program on the smallest card with bfloat16, compute capability 8.6, in bytes."""


# Ten seconds, since each form is compiled: the interpreter accepts what the compiler refuses.
def test_every_form_is_compiled_and_copies_ahead_into_memory_that_every_card_has(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}

    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled"], env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    kernels = [line for line in lines if "_attend" in line]
    assert len(kernels) == 10, "five cases, of one split and of several"
    assert len(lines) == 15, "several are joined"
    assert all("cp.async" in line for line in kernels)
    assert all(("mma" in line) is not line.startswith("single precision") for line in kernels)
    assert all(0 < int(line.split(", ")[2].split()[0]) <= SMALLEST for line in kernels)
