"""Triton's interpreter, with bfloat16 as a GPU has it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Round float32 to the nearest bfloat16, and multiply numbers; a GPU does.

    The interpreter of Triton 3.9 cuts digits off, and its matrix product takes the bits of bfloat16 for whole numbers.
    """
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
        product = interpreter.InterpreterBuilder.create_dot

        def of_numbers(builder: Any, left: Any, right: Any, *rest: Any) -> Any:
            return product(builder, *(in_float32(handle) for handle in (left, right)), *rest)

        def in_float32(handle: Any) -> Any:
            if handle.dtype.scalar != tl.bfloat16:
                return handle
            numbers = torch.from_numpy(np.array(handle.data)).view(torch.bfloat16).float().numpy()
            return interpreter.TensorHandle(numbers, tl.float32)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", of_numbers)
    yield
