"""What the calls of somebody else's loop have in common: who takes part, what is saved, where.

Where ranks of a loop that is not ours wait for one, it is named: every rank says now and then where it is, as
long as a call lasts. A run under our launcher has its failure channel for this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, TypedDict, Unpack

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore  # public under torch.distributed
from torch.optim import Optimizer

from holdfast.checkpoint.errors import SaveFailed
from holdfast.checkpoint.format.manifest import About, Manifest
from holdfast.checkpoint.format.snapshot import Snapshot, hold, mesh_of, take
from holdfast.checkpoint.place.layout import step_of
from holdfast.checkpoint.place.object_lease import ObjectLease
from holdfast.checkpoint.place.storage import Storage, open_storage
from holdfast.checkpoint.saving.agreement import together_in_phase
from holdfast.checkpoint.saving.writer import commit
from holdfast.config.versions import versions
from holdfast.errors import HoldfastError, RankFailed, UserError
from holdfast.optim.tagged_json import UnknownType, decode, encode
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.failure.classify import broken_by_peer, timed_out
from holdfast.parallel.failure.heartbeat import Heartbeat, Whereabouts
from holdfast.parallel.failure.reports import NoteBoard


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
    rank, current_phase = dist.get_rank(), ["begin"]
    board = NoteBoard(PrefixStore(f"holdfast/call{aside}", dist.distributed_c10d._get_default_store()), None)
    heartbeat = Heartbeat(rank, dist.get_world_size(), board, lambda: (None, f"{call}: {current_phase[0]}"))
    heartbeat.start()
    try:
        yield lambda phase: current_phase.__setitem__(0, phase)
    except Exception as error:
        if isinstance(error, HoldfastError) or not broken_by_peer(error):
            raise
        did = "waited until its time was over" if timed_out(error) else "lost another rank"
        late = "; ".join(map(_words, heartbeat.missing())) or "all ranks are there, so look at network and disk"
        first_line = str(error).strip().partition("\n")[0]
        raise raised(
            f"rank {rank} {did} in phase {current_phase[0]!r} of checkpoint.{call}: {late} ({first_line})."
        ) from error
    finally:
        heartbeat.stop()
        heartbeat.leave()


def _words(report: Whereabouts) -> str:
    return report.words() if report.phase else f"rank {report.rank} is in no call of holdfast.checkpoint"


class UnsavableExtra(UserError):  # noqa: N818 - the name says what is wrong
    """`extra` holds a type that has no written form."""


@contextmanager
def call(
    name: str, timeout_minutes: float, raised: type[HoldfastError], aside: str = ""
) -> Iterator[tuple[RankGroup, Callable[[str], None]]]:
    """Give the ranks that take part, and what is told each phase.

    Args:
        name: Of the function.
        timeout_minutes: Longest wait for another rank.
        raised: What is raised where a rank does not come.
        aside: Calls with another word may go on at the same time.
    """
    key = (dist.group.WORLD if dist.is_initialized() else None, timeout_minutes, aside)
    try:
        with late_ranks_named(name, raised, aside) as reached:
            if key not in _groups:
                _groups[key] = RankGroup(timeout_minutes)
            yield _groups[key], reached
    except (SaveFailed, RankFailed) as error:
        if error.__cause__ is not None and broken_by_peer(error.__cause__):
            _groups.pop(key, None)  # its sockets are closed
        raise


_groups: dict[tuple[object, float, str], RankGroup] = {}
"""By world, time-out and purpose: a process group is made once and kept."""


def forget_groups() -> None:
    """Let the next calls make process groups of their own."""
    _groups.clear()


def place_of(path: str) -> tuple[Storage, str]:
    """Split a checkpoint's path into the storage it is in and its name there."""
    scheme, colon, location = str(path).rpartition("://")
    full_path = PurePosixPath(location)
    return open_storage(f"{scheme}{colon}{full_path.parent}"), full_path.name


@dataclass(frozen=True)
class PreparedSave:
    """A checkpoint that is about to be written."""

    storage: Storage
    name: str
    snapshot: Snapshot
    """Of the live tensors."""
    about: About

    def committed(self, snapshot: Snapshot, ranks: RankGroup, reached: Callable[[str], None]) -> Manifest:
        """Write a snapshot, this one or a copy of it; all ranks call this together."""
        with ExitStack() as stack:
            with together_in_phase(ranks, "begin"):
                if ranks.rank == 0 and not self.storage.renames:
                    stack.enter_context(ObjectLease(self.storage, self.name))
            return commit(snapshot, self.storage, self.about, ranks, name=self.name, reached=reached)


class SaveOptions(TypedDict, total=False):
    """Optional arguments that `save` and `save_in_background` share."""

    rank_extra: Any
    assets: Mapping[str, bytes] | None
    frozen: bool
    parent: Manifest | None


def prepared(
    ranks: RankGroup,
    path: str,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Any,
    **options: Unpack[SaveOptions],
) -> PreparedSave:
    """Look at what `save` was given; arguments are its own.

    Raises:
        UnsavableExtra, UnsavableOptimizer: On all ranks.
    """
    with ranks.together():
        storage, name = place_of(path)
        snapshot = take(
            hold(model, frozen=options.get("frozen", True)),
            optimizer,
            shared={"extra": encoded_extra(extra)},
            rank_state={"extra": encoded_extra(options.get("rank_extra"))},
            assets=options.get("assets"),
        )
    parent = options.get("parent")
    about = About(
        run_id=storage.root,
        step=step_of(name) or 0,
        parent=None if parent is None else parent.hash,
        parent_step=None if parent is None else parent.step,
        mesh=mesh_of(model),
        versions=versions(),
    )
    return PreparedSave(storage, name, snapshot, about)


def check_extra(shared: Mapping[str, Any], rank_state: Mapping[str, Any] | None) -> None:
    """Refuse an `extra` that cannot be read, before anything live is touched."""
    decode((shared if rank_state is None else rank_state).get("extra"))


def encoded_extra(value: Any) -> Any:
    """Return what a user wants to keep, as it is written.

    Raises:
        UnsavableExtra: Something in it has no written form.
    """
    try:
        return encode(value)
    except UnknownType as error:
        raise UnsavableExtra(
            f"extra holds a {error}, which has no written form. Use numbers, texts, lists, tuples, dictionaries, "
            "dtypes or small tensors; per-tensor state belongs into the model or the optimizer."
        ) from None
