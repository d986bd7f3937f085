"""A detector of races between streams: what one stream reads or writes must be ordered with what another one did.

Each stream has a vector clock. An event carries the clock of its stream to whoever waits for it. Two accesses of one
storage of which one writes must be ordered by these clocks, and so must its release and every access, unless the
storage was told of the other stream by `record_stream`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Event:
    """A moment of a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: dict[int, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        """Take the present moment of a stream."""
        self.clock = dict((stream or Stream.current).clock)

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait."""
        (stream or Stream.current).wait_event(self)


class Stream:
    """A queue of work; the first is the one that computes."""

    current: Stream
    host: Stream
    """The process itself, which works on host memory at once, and queues."""
    count = 0
    device, priority, cuda_stream, stream_id = torch.device("cuda:0"), 0, 0, 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = Stream.count
        Stream.count += 1
        self.clock = {self.number: 0}

    def record_event(self, event: Event | None = None) -> Event:
        """Return the present moment."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Let what is queued from now on wait for an event."""
        for number, count in event.clock.items():
            self.clock[number] = max(self.clock.get(number, 0), count)

    def synchronize(self) -> None:
        """Let the host wait."""
        Stream.host.wait_event(self.record_event())

    def wait_stream(self, other: Stream) -> None:
        """Let what is queued from now on wait for all that another stream has been given."""
        self.wait_event(other.record_event())


@contextlib.contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    """Queue on a stream within the block."""
    before, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = before


@dataclass
class Access:
    """What a stream did with a storage, and when."""

    stream: int
    count: int
    writes: bool
    operation: str


@dataclass
class Storage:
    """What was done with a storage."""

    owner: Stream | None
    """The stream that allocates it; None in pinned host memory, which is given away when all copies are done."""
    accesses: list[Access] = field(default_factory=list)
    told: set[int] = field(default_factory=set)
    reference: Any = None


class Detector(TorchDispatchMode):
    """Notes every operation's accesses, and the races among them."""

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self.order: list[str] = []
        """Products, and copies between host and device, with their stream, in the order in which they were queued."""
        self._storages: dict[int, Storage] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note its accesses."""
        result = function(*args, **(kwargs or {}))
        name = str(function).removeprefix("aten.")
        if name.startswith("empty"):
            self._storage(result)  # belongs to the stream that allocates it, whichever writes to it first
        if name.startswith(("empty", "prim", "detach", "alias")) or function.is_view:
            return result
        schema, written = function._schema, set()
        for argument, value in zip(schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                written.add(id(value))
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        results = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        stream = Stream.current
        if all(value.device.type == "cpu" for value in (*tensors, *results)):
            stream = Stream.host
        else:
            stream.wait_event(Stream.host.record_event())  # what is queued now runs after what the host has done
        for value in tensors:
            self._access(value, name, stream, writes=id(value) in written)
        known = {value.untyped_storage()._cdata for value in tensors}
        for value in results:
            if value.untyped_storage()._cdata not in known:
                self._access(value, name, stream, writes=True)
        if name.startswith("copy_") and args[0].device.type != args[1].device.type:
            way = "to the host" if args[0].device.type == "cpu" else "to the device"
            self.order.append(f"{way} by {Stream.current.number}")
        if name.startswith("mm."):
            self.order.append(f"product by {Stream.current.number}")
        return result

    @property
    def told(self) -> Any:
        """What stands for `Tensor.record_stream`: a storage must outlive what the stream does with it."""

        def record_stream(tensor: Tensor, stream: Stream) -> None:
            self._storage(tensor).told.add(stream.number)

        return record_stream

    def _storage(self, tensor: Tensor) -> Storage:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            reference = weakref.ref(storage, functools.partial(self._freed, key))
            owner = None if tensor.device.type == "cpu" else Stream.current
            self._storages[key] = Storage(owner, reference=reference)
        return self._storages[key]

    def _access(self, tensor: Tensor, operation: str, stream: Stream, *, writes: bool) -> None:
        storage = self._storage(tensor)
        stream.clock[stream.number] += 1
        for earlier in storage.accesses:
            if (writes or earlier.writes) and stream.clock.get(earlier.stream, 0) < earlier.count:
                self.races.append(f"{operation} by stream {stream.number} and {earlier.operation} by {earlier.stream}")
        storage.accesses.append(Access(stream.number, stream.clock[stream.number], writes, operation))

    def _freed(self, key: int, _: object) -> None:
        storage = self._storages.pop(key, None)
        if storage is None or storage.owner is None:
            return
        for access in storage.accesses:
            done = storage.owner.clock.get(access.stream, 0) >= access.count
            if not done and access.stream not in storage.told and access.stream != storage.owner.number:
                self.races.append(f"freed before {access.operation} by stream {access.stream} is known to be done")
