"""Whether there is room for a checkpoint."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.errors import SaveFailed
from holdfast.checkpoint.snapshot import Snapshot
from holdfast.checkpoint.storage import Storage
from holdfast.parallel.collectives import ProcessExchange
from holdfast.parallel.materialise import local_part


def refuse_full_disk(snapshot: Snapshot, storage: Storage, ranks: ProcessExchange) -> None:
    """Compare what ranks will write with what is free; all ranks call this together.

    Raises:
        SaveFailed: There is too little, or nobody can say; on all ranks.
    """
    needed = sum(ranks.gather(_bytes_to_write(snapshot, first=ranks.rank == 0)))
    known: int | None = None
    with ranks.together():
        if ranks.rank == 0:
            try:
                known = storage.free_bytes()
            except OSError as error:
                raise SaveFailed(f"{storage.root} does not say how much is free: {error.strerror or error}.") from error
    free = ranks.agree(known)
    if free is not None and free < 1.2 * needed:
        raise SaveFailed(
            f"{storage.root} has {free / 2**20:,.0f} MiB free, a checkpoint needs {1.2 * needed / 2**20:,.0f} MiB. "
            "Free some space or choose another run.dir."
        )


def _bytes_to_write(snapshot: Snapshot, *, first: bool) -> int:
    """Return this rank's share; of copies on several ranks one is written."""
    local = [local_part(tensor) for tensor in snapshot.tensors.values() if _counts_here(tensor, first=first)]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def _counts_here(tensor: Tensor, *, first: bool) -> bool:
    if not isinstance(tensor, DTensor):
        return first
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return False
    return not any(at and how.is_replicate() for at, how in zip(place, tensor.placements, strict=True))
