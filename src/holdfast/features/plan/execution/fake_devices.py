"""Stand-ins that let CUDA branches run where there is no GPU: tensors have shapes and devices, and hold no numbers.

Every name of torch that is replaced for this stands in `REPLACED`; `absent_names` says which of them a torch lacks.
Most builds need the guard besides, loaded before torch (`process.py`)."""

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


class FakeStream:
    """Replaces CUDA streams, events and device contexts; every wait returns at once."""

    device, priority, cuda_stream, stream_id = torch.device("cuda:0"), 0, 0, 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def record_event(self, *_: Any) -> FakeStream:
        """Return an event that may be waited for."""
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


class AnyGenerator(torch.Generator):
    """A generator that accepts any device and lives on the CPU, since fake tensors draw no numbers."""

    def __new__(cls, _: object = None) -> AnyGenerator:
        """Create a generator on the CPU, whatever the device."""
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]  # torch's stub has none


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


_nothing = _always(None)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *positional: Any, **options: Any
) -> Tensor:
    """Call a GPU's kernel; without a GPU, torch picks the form that lays out all [T, T] scores."""
    repeats = query.shape[1] // key.shape[1] if options.pop("enable_gqa", False) else 1
    key, value = (heads.repeat_interleave(repeats, 1) if repeats > 1 else heads for heads in (key, value))
    positional = (
        *positional,
        *(options.pop(name, off) for name, off in (("dropout_p", 0.0), ("is_causal", False))[len(positional) :]),
    )
    out: Tensor
    if attn_mask is None and query.dtype in {torch.bfloat16, torch.float16}:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out = flash(query, key, value, *positional, **options)[0]
        return out
    if attn_mask is not None:
        kind = query.dtype if attn_mask.dtype is torch.bool else attn_mask.dtype
        attn_mask = attn_mask.to(kind).expand(*query.shape[:3], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out = efficient(query, key, value, attn_mask, query.requires_grad, *positional, **options)[0]
    return out


def _unseen(original: Callable[..., Any]) -> Callable[..., Any]:
    """DTensor infers shapes by running operations on whole tensors: these are no memory and no work of a rank."""

    @functools.wraps(original)
    def inferred(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(*args, **kwargs)

    return inferred


def _of_cuda(value: Any, *names: str) -> dict[str, Any]:
    return {f"torch.cuda:{name}": value for name in names}


_PROPAGATOR = "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached"
_FREE = "torch.cuda:mem_get_info"
REPLACED: dict[str, Any] = {
    "torch:Generator": AnyGenerator,
    "torch:Tensor.record_stream": _nothing,
    "torch:Tensor.pin_memory": lambda tensor, *_, **__: tensor,
    "torch:Tensor.is_pinned": _always(True),
    "torch.nn.functional:scaled_dot_product_attention": _attention,
    "torch.accelerator:current_stream": _always(FakeStream()),
    "torch.accelerator:set_stream": _nothing,
    **_of_cuda(FakeStream, "Stream", "Event", "device"),
    **_of_cuda(_always(FakeStream()), "current_stream", "default_stream"),
    **_of_cuda(_nothing, "set_device", "synchronize", "empty_cache", "_lazy_init", "set_rng_state"),
    "torch.cuda:get_rng_state": lambda *_: torch.get_rng_state(),
    **_of_cuda(_always(0), "current_device", "memory_reserved", "memory_allocated"),
    **_of_cuda(_always(True), "is_available", "is_bf16_supported"),
    "torch.cuda:stream": lambda _: contextlib.nullcontext(),
    "torch.cuda:graph_pool_handle": _always((0, 0)),
    "torch.cuda:device_count": _always(8),
    "torch.cuda:get_device_name": _always("a device that computes nothing"),
    "torch.cuda:get_device_capability": _always((9, 0)),
    _FREE: _always((2**50, 2**50)),
    "torch._subclasses.fake_tensor:FakeTensorMode.avoid_device_init": True,
    _PROPAGATOR: _unseen,
}
"""Module and path in it -> what stands there meanwhile; of the propagator, what is made of what was there."""


def _place(name: str) -> tuple[Any, str]:
    module, _, path = name.partition(":")
    *owners, last = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), last


def absent_names() -> list[str]:
    """Return the names in `REPLACED` that this torch does not have, for which nothing can stand in."""

    absent = []
    for name in REPLACED:
        try:
            getattr(*_place(name))
        except (ImportError, AttributeError):
            absent.append(name)
    return absent


@contextlib.contextmanager
def fake_devices(
    kind: str = "cuda", free: Callable[[], int] = lambda: 2**50, total: int = 2**50
) -> Iterator[FakeTensorMode]:
    """Yield the mode under which tensors hold no numbers; of cuda, stand in for eight GPUs within the block.

    Nothing else in the process may use torch meanwhile. `free` says how many bytes a device of `total` bytes has left.
    """
    replaced = REPLACED | {_FREE: lambda *_: (free(), total)} if kind == "cuda" else {_PROPAGATOR: _unseen}
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            owner, last = _place(name)
            inherited = last not in vars(owner)
            stack.callback(delattr, owner, last) if inherited else stack.callback(
                setattr, owner, last, vars(owner)[last]
            )
            setattr(owner, last, value(getattr(owner, last)) if name == _PROPAGATOR else value)
        yield FakeTensorMode(allow_non_fake_inputs=True)
