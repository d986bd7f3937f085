"""Name the rank that a call waited for in vain: every rank says now and then where it is, as long as a call lasts.

A run under our launcher has its failure channel for this; somebody else's loop that saves with us has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # public under torch.distributed

from holdfast.errors import HoldfastError
from holdfast.parallel.failure.classify import broken_by_peer, timed_out
from holdfast.parallel.failure.heartbeat import Heartbeat, Whereabouts
from holdfast.parallel.failure.notes import Board


@contextmanager
def late_ranks_named(call: str, raised: type[HoldfastError], aside: str = "") -> Iterator[Callable[[str], None]]:
    """Raise, in place of a collective that another rank broke or never came to, an error with that rank and its phase.

    Args:
        call: What the user called.
        raised: The error's class.
        aside: Calls with another word may go on at the same time.

    Yields:
        What is told the name of each phase.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield lambda _: None
        return
    rank, now = dist.get_rank(), ["begin"]
    board = Board(PrefixStore(f"holdfast/call{aside}", dist.distributed_c10d._get_default_store()), None)
    heartbeat = Heartbeat(rank, dist.get_world_size(), board, lambda: (None, f"{call}: {now[0]}"))
    heartbeat.start()
    try:
        yield lambda phase: now.__setitem__(0, phase)
    except Exception as error:
        if isinstance(error, HoldfastError) or not broken_by_peer(error):
            raise
        did = "waited until its time was over" if timed_out(error) else "lost another rank"
        late = "; ".join(map(_words, heartbeat.missing())) or "all ranks are there, so look at network and disk"
        first_line = str(error).strip().splitlines()[0]
        raise raised(f"rank {rank} {did} in phase {now[0]!r} of checkpoint.{call}: {late} ({first_line}).") from error
    finally:
        heartbeat.stop()
        heartbeat.leave()


def _words(place: Whereabouts) -> str:
    return place.words() if place.phase else f"rank {place.rank} is in no call of holdfast.checkpoint"
