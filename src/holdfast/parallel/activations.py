"""Offload activations to host memory, block by block, while passes run.

Autograd hands each tensor that a block saves for its backward pass to a hook
(`torch.autograd.graph.saved_tensors_hooks`). When the block has run, the storages of these tensors are copied to host
memory on a stream of their own, and their device memory is freed when the next block has run. The backward pass of a
block begins with the fetch of the storages of the block before it, so that copies in both directions run beside a
block's computation. A block that is recomputed saves its inputs alone. Values come back bit for bit, with the strides
that they had.

On the device remain: parameters and buffers (FSDP2 gathers them again, and hooks see them), inputs that need no
gradient, which all blocks share (rotary angles, masks), small tensors, and what the last block saves, since its
backward pass comes next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from holdfast.errors import ModelError
from holdfast.parallel.storages import storages_of

SMALL_BYTES = 4096
"""Storages of fewer bytes stay: a copy takes longer to start than to run."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Stored:
    """The bytes of a storage; on the device, in host memory, or both."""

    device: Tensor | None
    host: tuple[Tensor, ...] = ()
    """Its bytes, one piece after the other."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Saved:
    """What autograd keeps in place of a tensor."""

    block: _BlockPass
    tensor: Tensor | None
    """The tensor itself while its block runs, and for good where it stays on the device."""
    version: int
    """How often it had been changed in place when it was saved."""
    stored: _Stored | None = None
    view: tuple[torch.dtype, int, torch.Size, tuple[int, ...]] | None = None
    """Dtype, offset in the storage in elements, shape and strides."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class _BlockPass:
    """One forward pass of one block, and its backward pass."""

    before: weakref.ref[_BlockPass] | None
    """The pass before it. References to passes are weak where nothing may keep what autograd has freed."""
    saved: list[weakref.ref[_Saved]] = field(default_factory=list)
    stored: list[weakref.ref[_Stored]] = field(default_factory=list)
    copied: torch.cuda.Event | None = None
    """When its storages are in host memory; None on a CPU, where copies are made at once."""
    fetched: torch.cuda.Event | None = None
    in_backward: bool = False


class ActivationOffload:
    """What the blocks of one model have in host memory.

    Args:
        device_type: Type of the device that the passes run on. On a CPU the same copies are made without streams.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._stream: torch.cuda.Stream | None = None
        self._running: _BlockPass | None = None
        self._copying: _BlockPass | None = None
        """The pass whose storages are copied to host memory and are still on the device."""
        self._latest: weakref.ref[_BlockPass] | None = None
        self.copied_bytes = 0
        """Bytes that were copied to host memory so far."""

    def run(self, block: nn.Module, args: Sequence[Any], options: Mapping[str, Any], *, stays: bool) -> Any:
        """Return what the block returns; what it saves is offloaded, unless it `stays`."""
        if not torch.is_grad_enabled():
            return block(*args, **options)
        block_pass, outer = _BlockPass(self._latest), self._running
        self._latest = weakref.ref(block_pass)
        self._running = block_pass
        try:
            with saved_tensors_hooks(self._keep, self._read):
                result = block(*args, **options)
        finally:
            self._running = outer
        self._free_copied()
        if not stays:
            self._send(block_pass, storages_of(_staying(block, args, options)))
        return result

    def start_backward(self, block_pass: _BlockPass) -> None:
        """Have what a block saved on the device, and start to fetch what the block before it did."""
        block_pass.in_backward = True
        self._fetch(block_pass)  # has been fetched, unless it is the first of a backward pass
        before = None if block_pass.before is None else block_pass.before()
        if before is not None:
            self._fetch(before)
        if block_pass.fetched is not None:
            torch.cuda.current_stream().wait_event(block_pass.fetched)

    def _keep(self, tensor: Tensor) -> _Saved:
        assert self._running is not None
        # An operation that saves what it returns would keep itself by it, in a cycle that no collector sees.
        kept = tensor if isinstance(tensor, nn.Parameter) else tensor.detach()
        saved = _Saved(self._running, kept, tensor._version)  # noqa: SLF001 - what torch itself compares
        self._running.saved.append(weakref.ref(saved))
        return saved

    def _read(self, saved: _Saved) -> Tensor:
        if not saved.block.in_backward:
            self.start_backward(saved.block)
        if saved.stored is None or saved.view is None:
            assert saved.tensor is not None
            _refuse_changed(saved)
            return saved.tensor
        assert saved.stored.device is not None
        dtype, offset, shape, strides = saved.view
        bytes_ = saved.stored.device
        whole = bytes_.numel() // dtype.itemsize * dtype.itemsize
        return bytes_[:whole].view(dtype).as_strided(shape, strides, offset)

    def _send(self, block_pass: _BlockPass, staying: Mapping[int, object]) -> None:
        """Start the copies of a pass to host memory."""
        by_storage: dict[int, _Stored] = {}
        for saved in _alive(block_pass.saved):
            tensor = saved.tensor
            if tensor is None or not self._is_plain(tensor):
                continue
            _refuse_changed(saved)
            storage = tensor.untyped_storage()
            key = storage._cdata  # noqa: SLF001 - the identity that torch itself goes by
            size = storage.nbytes()
            if key in staying or size < SMALL_BYTES or size % tensor.element_size():
                continue
            if key not in by_storage:
                by_storage[key] = _Stored(_bytes_behind(tensor))
                block_pass.stored.append(weakref.ref(by_storage[key]))
            saved.view = (tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())
            saved.stored, saved.tensor = by_storage[key], None
        pairs: list[tuple[Tensor, Tensor]] = []
        for stored in by_storage.values():
            assert stored.device is not None
            sizes = piece_sizes(stored.device.numel())
            stored.host = tuple(
                torch.empty(size, dtype=torch.uint8, pin_memory=self._device_type == "cuda") for size in sizes
            )
            self.copied_bytes += sum(sizes)
            pairs.extend(zip(stored.host, torch.split(stored.device, sizes), strict=True))
        block_pass.copied = self._copy(pairs)
        self._copying = block_pass

    def _free_copied(self) -> None:
        """Free the device memory of the pass that was copied last."""
        block_pass, self._copying = self._copying, None
        if block_pass is None:
            return
        if block_pass.copied is not None:
            # The allocator gives freed memory to the next kernel of this stream, which must not write before the
            # copy has read.
            torch.cuda.current_stream().wait_event(block_pass.copied)
        for stored in _alive(block_pass.stored):
            stored.device = None

    def _fetch(self, block_pass: _BlockPass) -> None:
        """Start the copies of a pass back to the device, of what is not there."""
        if block_pass is self._copying:
            self._copying = None  # its device memory was not freed, and is not any more
        pairs: list[tuple[Tensor, Tensor]] = []
        for stored in _alive(block_pass.stored):
            if stored.device is None:
                sizes = [piece.numel() for piece in stored.host]
                stored.device = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device_type)
                pairs.extend(zip(torch.split(stored.device, sizes), stored.host, strict=True))
        if not pairs:
            return
        block_pass.fetched = self._copy(pairs)
        if self._stream is not None:
            for target, _ in pairs:
                # A backward pass that fails frees this memory before anybody has waited for the copy.
                target.record_stream(self._stream)

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Copy second to first once what was queued before is done; return the event of its end, None on a CPU."""
        if self._device_type != "cuda":
            for target, source in pairs:
                target.copy_(source)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types for it
        # Sources are being computed, and targets may be memory that queued kernels still read.
        self._stream.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def _is_plain(self, tensor: Tensor) -> bool:
        wrapped: Any = tensor
        return tensor.device.type == self._device_type and not (
            isinstance(tensor, nn.Parameter) or is_traceable_wrapper_subclass(wrapped)
        )


class OffloadedBlock(ActivationWrapper):
    """A block whose saved tensors are offloaded; names of parameters are those without the wrapper."""

    def __init__(self, block: nn.Module, offload: ActivationOffload, *, stays: bool) -> None:
        super().__init__(block)  # type: ignore[no-untyped-call]  # torch has no types for it
        self.offload = offload
        self._stays = stays

    def forward(self, *args: Any, **options: Any) -> Any:
        """Run the block."""
        return self.offload.run(self._checkpoint_wrapped_module, args, options, stays=self._stays)


def offload_of(policy: nn.Module) -> ActivationOffload | None:
    """Return what offloads the activations of a model; None where they stay on the device."""
    return next((module.offload for module in policy.modules() if isinstance(module, OffloadedBlock)), None)


def piece_sizes(size: int) -> list[int]:
    """Return sizes that add up to a size, at most four; all but the last are powers of two.

    torch's allocator of pinned memory rounds a request up to a power of two: 129 MiB would take 256. Of these pieces
    the last one alone is rounded up, which is less than an eighth of the whole.
    """
    sizes: list[int] = []
    while size & (size - 1) and len(sizes) < 3:
        sizes.append(1 << (size.bit_length() - 1))
        size -= sizes[-1]
    return [*sizes, size]


def _alive(references: Iterable[Callable[[], Any]]) -> Iterator[Any]:
    return (value for value in (reference() for reference in references) if value is not None)


def _refuse_changed(saved: _Saved) -> None:
    """Refuse a tensor that was changed after it was saved: autograd compares that itself only where no hook has it.

    Raises:
        ModelError: It was.
    """
    tensor = saved.tensor
    if tensor is not None and tensor._version != saved.version:  # noqa: SLF001 - what torch itself compares
        raise ModelError(
            f"A block of the model changes in place what its backward pass needs, a tensor of {tuple(tensor.shape)}. "
            "Its gradients would be wrong; in the model's code, use the form of the operation that makes a new one."
        )


def _bytes_behind(tensor: Tensor) -> Tensor:
    """Return the bytes [nbytes] (uint8) of a tensor's whole storage, which share its memory."""
    # Not `set_`: the cache of a FakeTensorMode keeps a storage that is an argument.
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((elements,), (1,), 0).view(torch.uint8)


def _staying(block: nn.Module, args: Sequence[Any], options: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors whose storages a block must not offload, when its forward pass has ended."""
    yield from block.parameters()
    yield from block.buffers()
    for value in tree_leaves((args, options)):
        if isinstance(value, Tensor) and not value.requires_grad:
            yield value
    for module in block.modules():
        if isinstance(module, FSDPModule):
            # A unit inside the block has its shards in place again. `_unsharded_param` is what it gathers into, and
            # has no public reader.
            group = module._get_fsdp_state()._fsdp_param_group
            gathered = (
                [] if group is None else [getattr(value, "_unsharded_param", None) for value in group.fsdp_params]
            )
            yield from (value for value in gathered if value is not None)
