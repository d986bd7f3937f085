"""Save tensors that are read from other files: one is read while the previous one is written, so two are in memory."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from holdfast.checkpoint.format.manifest import Chunk, TensorEntry
from holdfast.checkpoint.format.snapshot import Snapshot, SnapshotDescription
from holdfast.checkpoint.format.unsupported_tensors import is_finite
from holdfast.checkpoint.place.hashing import hash_tensor


class _ReadTensor(NamedTuple):
    tensor: Tensor
    hash: str
    finite: bool


class ReadingPlanner(DefaultSavePlanner):
    """A DCP save planner for one process that reads each tensor when DCP asks for it, and describes it.

    This thread writes a tensor while another thread reads, checks and hashes the next one; all of these release the
    interpreter lock.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self._snapshot = snapshot
        self._described: dict[str, TensorEntry] = {}
        self._finite = True
        self._thread = ThreadPoolExecutor(1)
        self._following = dict(pairwise(snapshot.readers))
        self._ahead: tuple[str, Future[_ReadTensor]] | None = None
        self._written: Tensor | None = None

    def resolve_data(self, write_item: Any) -> Tensor:
        """Read and return a tensor, and free the memory of the previous one.

        Raises:
            ValueError: Its shape or dtype differs from the plan.
        """
        name = write_item.index.fqn
        if self._written is not None:
            # DCP has written it and keeps it until its file ends, so that a whole checkpoint would be in memory.
            self._written.untyped_storage().resize_(0)
        tensor, digest, finite = self._taken(name)
        planned, shape = self._snapshot.tensors[name], tuple(tensor.shape)
        if tensor.shape != planned.shape or tensor.dtype != planned.dtype:
            raise ValueError(f"{name} reads as {list(shape)} {tensor.dtype}, {list(planned.shape)} was planned")
        dtype = str(tensor.dtype).removeprefix("torch.")
        chunk = Chunk((0,) * tensor.ndim, shape, digest)
        self._described[name] = TensorEntry(shape, dtype, (chunk,), name in self._snapshot.trained)
        self._finite = self._finite and finite
        self._written = tensor
        return tensor

    def _taken(self, name: str) -> _ReadTensor:
        """Return the tensor that was read ahead, and start to read the next one."""
        ahead, self._ahead = self._ahead, None
        read = ahead[1] if ahead is not None and ahead[0] == name else self._thread.submit(self._read, name)
        result = read.result()
        if (following := self._following.get(name)) is not None:
            self._ahead = following, self._thread.submit(self._read, following)
        return result

    def _read(self, name: str) -> _ReadTensor:
        tensor = self._snapshot.readers[name]()
        return _ReadTensor(tensor, hash_tensor(tensor), is_finite(tensor))

    @property
    def described(self) -> SnapshotDescription:
        """Description of the tensors that were written."""
        return SnapshotDescription(dict(self._described), self._finite)
