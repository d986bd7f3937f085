"""Write Python values as JSON and read them back with the same type, for param groups and state of users.

JSON alone would turn a tuple into a list and could not hold a torch.dtype. A value of a type that JSON lacks becomes an
object with one key, its tag. A type without a tag is refused, so that no checkpoint needs pickle.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import HoldfastError


class UnknownType(HoldfastError):  # noqa: N818 - the name says what is wrong
    """A value has a type that cannot be written as JSON and read back the same."""


def encode(value: Any) -> Any:
    """Return a JSON-ready form of a value.

    Raises:
        UnknownType: Its type, or that of something inside it, has no tag.
    """
    if value is None or type(value) in {bool, int, str}:
        return value
    for kind, encoder in _ENCODERS.items():
        # A subclass may carry more than its parent's value; torch's and NumPy's scalars have subclasses of their own.
        if type(value) is kind or (kind in {np.generic, Tensor} and isinstance(value, kind)):
            return encoder(value)
    raise UnknownType(f"{type(value).__module__}.{type(value).__qualname__}")


def _encode_tensor(value: Tensor) -> Any:
    if value.numel() > 1024:
        raise UnknownType(f"a tensor of {value.numel()} elements")
    data = value.detach().cpu().contiguous()
    raw = base64.b64encode(data.flatten().view(torch.uint8).numpy().tobytes()).decode()
    return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), raw]}


def decode(value: Any) -> Any:
    """Return the value that `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    return _DECODERS[tag](content)


def _decode_tensor(content: Any) -> Tensor:
    dtype, shape, raw = content
    data = torch.frombuffer(bytearray(base64.b64decode(raw)), dtype=torch.uint8)
    return data.view(getattr(torch, dtype)).reshape(shape).clone()


_DECODERS: dict[str, Any] = {
    "float": float,
    "complex": lambda numbers: complex(*map(decode, numbers)),
    "bytes": base64.b64decode,
    "size": torch.Size,
    "tuple": lambda items: tuple(map(decode, items)),
    "set": lambda items: set(map(decode, items)),
    "frozenset": lambda items: frozenset(map(decode, items)),
    "dict": lambda items: {decode(key): decode(item) for key, item in items},
    "dtype": lambda name: getattr(torch, name),
    "device": torch.device,
    "tensor": _decode_tensor,
    "numpy": lambda fields: np.frombuffer(base64.b64decode(fields[1]), dtype=fields[0])[0],
}

_ENCODERS: dict[type, Callable[[Any], Any]] = {
    float: lambda value: value if math.isfinite(value) else {"float": repr(value)},
    complex: lambda value: {"complex": [encode(value.real), encode(value.imag)]},
    bytes: lambda value: {"bytes": base64.b64encode(value).decode()},
    torch.Size: lambda value: {"size": list(value)},
    tuple: lambda value: {"tuple": [encode(item) for item in value]},
    list: lambda value: [encode(item) for item in value],
    set: lambda value: {"set": sorted((encode(item) for item in value), key=repr)},
    frozenset: lambda value: {"frozenset": sorted((encode(item) for item in value), key=repr)},
    dict: lambda value: {"dict": [[encode(key), encode(item)] for key, item in value.items()]},
    torch.dtype: lambda value: {"dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"device": str(value)},
    np.generic: lambda value: {"numpy": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]},
    Tensor: _encode_tensor,
}
