"""Isolate the random numbers of trial steps, so that training draws the same numbers with and without them."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def private_randomness() -> Iterator[None]:
    """Seed torch's, NumPy's and Python's global generators within a block, and restore their states afterwards."""
    python, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global generator is meant
    # Without a list it takes every GPU of the machine, and warns that it does.
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if on_gpu else []):
            random.seed(0)
            np.random.seed(0)  # noqa: NPY002 - as above
            torch.manual_seed(0)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)  # noqa: NPY002 - as above


def with_own_generators(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same values, with copies in place of random generators among them."""
    return {key: _own(value) for key, value in values.items()}


def _own(value: Any) -> Any:
    match value:
        case torch.Generator():
            return torch.Generator(value.device).set_state(value.get_state())
        case random.Random() | np.random.Generator() | np.random.RandomState():
            return copy.deepcopy(value)
        case _:
            return value
