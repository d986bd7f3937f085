"""Everything that a run holds, as bytes by its place, found by looking through its objects."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.data.batches.ahead import StreamAhead
from holdfast.parallel.shards import local_part

PLAIN = (str, int, float, bool, bytes, type(None), Path, Enum, np.generic, torch.dtype, torch.device)


def holdings(root: Any) -> dict[str, bytes]:
    """Return the bytes of every value that is reachable from a run, by its path, and of this process's random states.

    Tensors and arrays are bytes, generators their states, modules their parameters, buffers and modes, optimizers their
    groups and states. Objects of the package, containers and what functions close over are looked into; other objects,
    such as threads, sockets and tokenizers, are not. Of a stream that is read ahead its saved state counts.
    """
    values = dict(_found(root, "run", {}))
    values["python draws"] = repr(random.getstate()).encode()
    values["numpy draws"] = repr(
        [part.tolist() if isinstance(part, np.ndarray) else part for part in _numpy()]
    ).encode()
    values["torch draws"] = bytes(torch.get_rng_state().numpy())
    values["environment"] = repr(sorted(os.environ.items())).encode()
    values["torch settings"] = repr((torch.get_num_threads(), torch.get_default_dtype())).encode()
    return values


def files(directory: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a directory, by path."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def _numpy() -> Any:
    return np.random.get_state()  # noqa: NPY002 - the global generator is meant


def _found(value: Any, path: str, seen: dict[int, Any]) -> Iterator[tuple[str, bytes]]:
    if isinstance(value, PLAIN):
        yield path, repr(value).encode()
        return
    if id(value) in seen:
        return
    seen[id(value)] = value  # kept, or another object might get its number
    if isinstance(value, Tensor):
        yield from _tensor(value, path)
    elif isinstance(value, np.ndarray):
        yield path, value.tobytes()
    elif isinstance(value, torch.Generator):
        yield path, bytes(value.get_state().numpy())
    elif isinstance(value, random.Random):
        yield path, repr(value.getstate()).encode()
    elif isinstance(value, np.random.Generator):
        yield path, repr(value.bit_generator.state).encode()
    elif isinstance(value, BaseModel):
        yield path, value.model_dump_json().encode()
    elif isinstance(value, StreamAhead):
        yield path, repr(value.state()).encode()
    else:
        for name, below in _below(value):
            yield from _found(below, f"{path}.{name}", seen)


def _tensor(value: Tensor, path: str) -> Iterator[tuple[str, bytes]]:
    yield f"{path}.has_gradient", repr(value.is_leaf and value.grad is not None).encode()
    if value.is_meta:
        yield path, repr((value.shape, value.dtype)).encode()
        return
    local = local_part(value.detach()).cpu().contiguous()
    yield path, bytes(local.flatten().view(torch.uint8).numpy())


def _below(value: Any) -> Iterator[tuple[str, Any]]:
    """Return the parts of an object, by name."""
    if isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in list(value.items()))
    elif isinstance(value, list | tuple | deque):
        yield from ((str(index), item) for index, item in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield "items", repr(sorted(map(repr, value)))
    elif isinstance(value, nn.Module):
        yield from value.named_parameters()
        yield from value.named_buffers()
        yield from ((f"{name}.training", module.training) for name, module in value.named_modules())
        yield from ((f"{name}.requires_grad", each.requires_grad) for name, each in value.named_parameters())
    elif isinstance(value, Optimizer):
        yield "param_groups", value.param_groups
        yield "state", list(value.state.values())
    elif isinstance(value, partial):
        yield "called", (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield "self", value.__self__
    elif isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        yield "closure", [cell.cell_contents for cell in cells]
    elif type(value).__module__.startswith("holdfast"):
        names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        yield from ((name, getattr(value, name)) for name in names if hasattr(value, name))
        yield from getattr(value, "__dict__", {}).items()
