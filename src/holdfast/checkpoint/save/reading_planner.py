"""A save of tensors that lie in other files: each is read when it is written, and one is in memory at a time."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from holdfast.checkpoint.format.manifest import Chunk, TensorEntry
from holdfast.checkpoint.format.snapshot import Described, Snapshot
from holdfast.checkpoint.format.unsupported_tensors import is_finite
from holdfast.checkpoint.place.hashing import hash_tensor


class ReadingPlanner(DefaultSavePlanner):
    """Reads a tensor when DCP asks for its numbers, and describes it while they are in memory; of one process alone."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self._snapshot = snapshot
        self._described: dict[str, TensorEntry] = {}
        self._finite = True

    def resolve_data(self, write_item: Any) -> Tensor:
        """Return a whole tensor.

        Raises:
            ValueError: It is another than was planned.
        """
        name = write_item.index.fqn
        planned, tensor = self._snapshot.tensors[name], self._snapshot.readers[name]()
        if tensor.shape != planned.shape or tensor.dtype != planned.dtype:
            raise ValueError(f"{name} reads as {list(tensor.shape)} {tensor.dtype}, {list(planned.shape)} was planned")
        shape = tuple(tensor.shape)
        chunk = Chunk((0,) * tensor.ndim, shape, hash_tensor(tensor))
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._described[name] = TensorEntry(shape, dtype, (chunk,), name in self._snapshot.trained)
        self._finite = self._finite and is_finite(tensor)
        return tensor

    @property
    def described(self) -> Described:
        """What was written."""
        return Described(dict(self._described), self._finite)
