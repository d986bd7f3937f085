"""Stand-ins that let CUDA branches run where there is no GPU: tensors have shapes and devices, and hold no numbers.

Every private name of torch that the house leans on for this stands in `REPLACED`; `absent_names` says which of them a
version of torch no longer has. A build without CUDA needs the guard besides (`plan/guard.py`), loaded before torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

CAPABILITY = (9, 0)
"""Of the devices that are stood in for: Hopper, whose kernels our branches ask for."""


class Idle:
    """Stands for a stream, an event and a device context: nothing is ever waited for."""

    device, priority, cuda_stream, stream_id = torch.device("cuda:0"), 0, 0, 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> Idle:
        """Return itself, as it may be waited for."""
        return self

    record_event = record

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


class AnyGenerator(torch.Generator):
    """A generator of any device, made on the CPU: no numbers are drawn."""

    def __new__(cls, device: object = None) -> AnyGenerator:
        """Leave the device out."""
        del device
        return super().__new__(cls, "cpu")


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _idle(*_: Any, **__: Any) -> Idle:
    return Idle()


def _same(self: Tensor, *_: Any, **__: Any) -> Tensor:
    return self


def _attention(  # noqa: PLR0913, PLR0917 - torch's own form
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call the kernel that a GPU would get; without one, torch picks the form that lays out all [T, T] scores."""
    repeats = query.shape[1] // key.shape[1] if enable_gqa else 1
    key, value = (part.repeat_interleave(repeats, 1) if repeats > 1 else part for part in (key, value))
    out: Tensor
    if attn_mask is None and query.dtype in {torch.bfloat16, torch.float16}:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out = efficient(query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale)[0]
    return out


def _shapes_unseen(original: Callable[..., Any]) -> Callable[..., Any]:
    """DTensor infers shapes by running operations on whole tensors: these are no memory and no work of a rank."""

    @functools.wraps(original)
    def inferred(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(*args, **kwargs)

    return inferred


_PROPAGATOR = "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached"
REPLACED: dict[str, Any] = {
    "torch:Generator": AnyGenerator,
    "torch:Tensor.record_stream": _nothing,
    "torch:Tensor.pin_memory": _same,
    "torch:Tensor.is_pinned": _always(True),
    "torch.cuda:is_available": _always(True),
    "torch.cuda:device_count": _always(8),
    "torch.cuda:current_device": _always(0),
    "torch.cuda:get_device_name": _always("a device that computes nothing"),
    "torch.cuda:get_device_capability": _always(CAPABILITY),
    "torch.cuda:is_bf16_supported": _always(True),
    "torch.cuda:device": Idle,
    **dict.fromkeys((f"torch.cuda:{name}" for name in ("Stream", "Event", "current_stream", "default_stream")), _idle),
    "torch.accelerator:current_stream": _idle,
    **dict.fromkeys((f"torch.cuda:{name}" for name in ("set_device", "synchronize", "empty_cache")), _nothing),
    **dict.fromkeys((f"torch.cuda:{name}" for name in ("memory_reserved", "memory_allocated")), _always(0)),
    "torch.cuda:mem_get_info": _always((2**50, 2**50)),
    "torch.cuda:_lazy_init": _nothing,
    "torch.cuda:stream": lambda _: contextlib.nullcontext(),
    "torch.nn.functional:scaled_dot_product_attention": _attention,
    "torch._subclasses.fake_tensor:FakeTensorMode.avoid_device_init": True,
    _PROPAGATOR: _shapes_unseen,
}
"""Module and path in it -> what stands there meanwhile; of a name in `_WRAPPED`, what is made of what was there."""
_WRAPPED = {_PROPAGATOR}
_STREAM_CLASSES = {"torch.cuda:Stream", "torch.cuda:Event"}


def _place(name: str) -> tuple[Any, str]:
    module, _, path = name.partition(":")
    *owners, last = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), last


def absent_names() -> list[str]:
    """Return the names in `REPLACED` that this torch does not have, for which nothing can stand in."""

    def absent(name: str) -> bool:
        try:
            owner, last = _place(name)
        except (ImportError, AttributeError):
            return True
        return not hasattr(owner, last)

    return [name for name in REPLACED if absent(name)]


@contextlib.contextmanager
def fake_devices(free: Callable[[], int] = lambda: 2**50) -> Iterator[FakeTensorMode]:
    """Stand in for eight GPUs within the block, and yield the mode under which tensors hold no numbers.

    Only one block at a time, and nothing else in the process may use torch meanwhile.

    Args:
        free: Bytes that a device has left, for who asks.
    """
    before, told = {}, {"torch.cuda:mem_get_info": lambda *_: (free(), free())}
    for name, value in (REPLACED | told).items():
        owner, last = _place(name)
        before[name] = owner.__dict__.get(last, before)
        made = Idle if name in _STREAM_CLASSES else value(getattr(owner, last)) if name in _WRAPPED else value
        setattr(owner, last, made)
    try:
        yield FakeTensorMode(allow_non_fake_inputs=True)
    finally:
        for name, value in before.items():
            owner, last = _place(name)
            if value is before:
                delattr(owner, last)
            else:
                setattr(owner, last, value)
