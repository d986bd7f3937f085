"""Whether there is room for a checkpoint."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.errors import SaveFailed
from holdfast.checkpoint.format.snapshot import Snapshot
from holdfast.files import size_words
from holdfast.parallel.collectives import ProcessExchange
from holdfast.parallel.shards import local_part


def refuse_full_disk(snapshot: Snapshot, place: str, free: int | None, ranks: ProcessExchange) -> None:
    """Compare what ranks will write with what is free; all ranks call this together.

    Args:
        snapshot: This rank's part.
        place: Where to, for the message.
        free: Bytes, the same on all ranks; None where nobody can say.
        ranks: Who writes.

    Raises:
        SaveFailed: There is too little; on all ranks.
    """
    needed = sum(ranks.gather(_bytes_to_write(snapshot, first=ranks.rank == 0)))
    if free is not None and free < 1.2 * needed:
        raise SaveFailed(
            f"{place} has {size_words(free)} free, a checkpoint needs {size_words(1.2 * needed)}. Free some "
            "space or choose another run.dir."
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
