"""Joint calls: functions that all ranks of a loop outside of a run call together, with errors that name the late rank.

During a call every rank publishes heartbeats, so that an error can name the rank that the others waited for. A run of
Holdfast has its failure channel for this; a user's own loop has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # public under torch.distributed

from holdfast.errors import HoldfastError
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.failure.classify import broken_by_peer, timed_out
from holdfast.parallel.failure.heartbeat import Heartbeat
from holdfast.parallel.failure.reports import NoteBoard

_groups: dict[tuple[object, float, str], RankGroup] = {}
"""Process groups by default group, time-out and `aside`; each is created once and kept."""


def forget_groups() -> None:
    """Drop all cached process groups, so that the next calls create new ones."""
    _groups.clear()


@contextmanager
def joint_call(
    name: str, timeout_minutes: float, raised: type[HoldfastError], aside: str = ""
) -> Iterator[tuple[RankGroup, Callable[[str], None]]]:
    """Yield the group of ranks for a call, and a function to call with the name of each phase as it begins.

    The error of a collective that another rank broke or did not join is replaced by one that names the rank.

    Args:
        name: Package and name of the function that the user called, e.g. "checkpoint.save".
        timeout_minutes: Longest wait for another rank.
        raised: Class of the error where a rank does not arrive.
        aside: Distinguishes calls that may run at the same time, such as a save in the background.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield RankGroup(), lambda _: None
        return
    key = (dist.group.WORLD, timeout_minutes, aside)
    rank, current_phase = dist.get_rank(), ["begin"]
    # Torch has no public way to the store of the default group, and a user's loop hands us none.
    board = NoteBoard(PrefixStore(f"holdfast/call{aside}", dist.distributed_c10d._get_default_store()), None)
    heartbeat = Heartbeat(rank, dist.get_world_size(), board, lambda: (None, f"{name}: {current_phase[0]}"))
    heartbeat.start()
    try:
        if key not in _groups:
            _groups[key] = RankGroup(timeout_minutes)
        yield _groups[key], lambda phase: current_phase.__setitem__(0, phase)
    except Exception as error:
        if isinstance(error, HoldfastError) or not broken_by_peer(error):
            raise
        _groups.pop(key, None)  # its sockets are closed
        did = "waited until its time was over" if timed_out(error) else "lost another rank"
        package = f"holdfast.{name.partition('.')[0]}"
        reports = [
            report.words() if report.phase else f"rank {report.rank} is in no call of {package}"
            for report in heartbeat.missing()
        ]
        late = "; ".join(reports) or "all ranks are there, so look at network and disk"
        first_line = str(error).strip().partition("\n")[0]
        raise raised(f"rank {rank} {did} in phase {current_phase[0]!r} of {name}: {late} ({first_line}).") from error
    finally:
        heartbeat.stop()
        heartbeat.leave()
