"""Python values as JSON, and back as the same type: what a param group may hold besides numbers.

JSON alone would turn a tuple into a list and refuse a torch.dtype. Each value of another type than JSON's own becomes
an object with one key, its tag. A type without a tag is refused, so that nothing needs pickle.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import HoldfastError


class UnknownType(HoldfastError):  # noqa: N818 - the name says what is wrong
    """A value has a type that cannot be written as JSON and read back the same."""


def encode(value: Any) -> Any:  # noqa: C901, PLR0912 - one case per type
    """Return a JSON-ready form of a value.

    Raises:
        UnknownType: Its type, or that of something inside it, has no tag.
    """
    match value:
        case None | bool():
            return value
        case np.generic():
            return {"numpy": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
        case int() | str() if type(value) in {int, str}:
            return value
        case float() if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        case complex():
            return {"complex": [encode(value.real), encode(value.imag)]}
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case torch.Size():
            return {"size": list(value)}
        case tuple() if type(value) is tuple:
            return {"tuple": [encode(item) for item in value]}
        case list():
            return [encode(item) for item in value]
        case set() | frozenset():
            return {type(value).__name__: sorted((encode(item) for item in value), key=repr)}
        case dict():
            return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case torch.device():
            return {"device": str(value)}
        case Tensor() if value.numel() <= 1024:
            return _encode_tensor(value)
    raise UnknownType(f"{type(value).__module__}.{type(value).__qualname__}")


def _encode_tensor(value: Tensor) -> Any:
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
    "complex": lambda parts: complex(*map(decode, parts)),
    "bytes": base64.b64decode,
    "size": torch.Size,
    "tuple": lambda items: tuple(map(decode, items)),
    "set": lambda items: set(map(decode, items)),
    "frozenset": lambda items: frozenset(map(decode, items)),
    "dict": lambda items: {decode(key): decode(item) for key, item in items},
    "dtype": lambda name: getattr(torch, name),
    "device": torch.device,
    "tensor": _decode_tensor,
    "numpy": lambda parts: np.frombuffer(base64.b64decode(parts[1]), dtype=parts[0])[0],
}
