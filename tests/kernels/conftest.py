"""Triton's interpreter, rounding to bfloat16 as a GPU does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def rounding_to_nearest(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Round float32 to the nearest bfloat16; the interpreter of Triton 3.9 cuts digits off, a GPU never does."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        import triton.language as tl
        from triton.runtime import interpreter

        cut = interpreter._convert_float

        def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
            if source == tl.float32 and target == tl.bfloat16:
                # A copy, since torch warns of memory that it may not write to.
                return torch.from_numpy(np.array(values)).bfloat16().view(torch.uint16).numpy()
            return cut(values, source, target, rounding)

        monkeypatch.setattr(interpreter, "_convert_float", converted)
    yield
