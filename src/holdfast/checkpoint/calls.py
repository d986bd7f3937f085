"""Common code of the functions in `checkpoint.api`: process groups, error messages that name ranks, arguments.

During a call, every rank publishes heartbeats, so that an error can name the rank that the others waited for. A run of
Holdfast has its failure channel for this; a user's own loop has not.
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
from holdfast.parallel.failure.heartbeat import Heartbeat
from holdfast.parallel.failure.reports import NoteBoard


@contextmanager
def late_ranks_named(call: str, raised: type[HoldfastError], aside: str = "") -> Iterator[Callable[[str], None]]:
    """Replace the error of a collective that another rank broke or did not join by one that names the rank.

    Args:
        call: Name of the function that the user called.
        raised: Class of the error to raise.
        aside: Distinguishes calls that may run at the same time, such as a save in the background.

    Yields:
        A function to call with the name of each phase as it begins.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield lambda _: None
        return
    rank, current_phase = dist.get_rank(), ["begin"]
    # Torch has no public way to the store of the default group, and a user's loop hands us none.
    board = NoteBoard(PrefixStore(f"holdfast/call{aside}", dist.distributed_c10d._get_default_store()), None)
    heartbeat = Heartbeat(rank, dist.get_world_size(), board, lambda: (None, f"{call}: {current_phase[0]}"))
    heartbeat.start()
    try:
        yield lambda phase: current_phase.__setitem__(0, phase)
    except Exception as error:
        if isinstance(error, HoldfastError) or not broken_by_peer(error):
            raise
        did = "waited until its time was over" if timed_out(error) else "lost another rank"
        reports = [
            report.words() if report.phase else f"rank {report.rank} is in no call of holdfast.checkpoint"
            for report in heartbeat.missing()
        ]
        late = "; ".join(reports) or "all ranks are there, so look at network and disk"
        first_line = str(error).strip().partition("\n")[0]
        raise raised(
            f"rank {rank} {did} in phase {current_phase[0]!r} of checkpoint.{call}: {late} ({first_line})."
        ) from error
    finally:
        heartbeat.stop()
        heartbeat.leave()


class UnsavableExtra(UserError):  # noqa: N818 - the name says what is wrong
    """`extra` holds a value of a type that cannot be written to a checkpoint."""


@contextmanager
def call(
    name: str, timeout_minutes: float, raised: type[HoldfastError], aside: str = ""
) -> Iterator[tuple[RankGroup, Callable[[str], None]]]:
    """Yield the group of ranks for a call, and a function to call with the name of each phase as it begins.

    Args:
        name: Name of the function that the user called.
        timeout_minutes: Longest wait for another rank.
        raised: Class of the error where a rank does not arrive.
        aside: Distinguishes calls that may run at the same time, such as a save in the background.
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
"""Process groups by default group, time-out and `aside`; each is created once and kept."""


def forget_groups() -> None:
    """Drop all cached process groups, so that the next calls create new ones."""
    _groups.clear()


def place_of(path: str) -> tuple[Storage, str]:
    """Split a checkpoint's path into the storage it is in and its name there."""
    scheme, colon, location = str(path).rpartition("://")
    full_path = PurePosixPath(location)
    return open_storage(f"{scheme}{colon}{full_path.parent}"), full_path.name


@dataclass(frozen=True)
class PreparedSave:
    """The checked arguments of a save: where to write, the live tensors, and the fields of the manifest."""

    storage: Storage
    name: str
    snapshot: Snapshot
    """Snapshot of the live tensors."""
    about: About

    def committed(self, snapshot: Snapshot, ranks: RankGroup, reached: Callable[[str], None]) -> Manifest:
        """Write `self.snapshot` or a copy of it as a checkpoint; all ranks call this together."""
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
    """Check the arguments of `save` and take a snapshot of the live tensors.

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
    """Raise if the `extra` of a checkpoint cannot be decoded; called before anything live is changed."""
    decode((shared if rank_state is None else rank_state).get("extra"))


def encoded_extra(value: Any) -> Any:
    """Return `extra` or `rank_extra` as tagged JSON.

    Raises:
        UnsavableExtra: It holds a value of a type that cannot be written.
    """
    try:
        return encode(value)
    except UnknownType as error:
        raise UnsavableExtra(
            f"extra holds a {error}, which has no written form. Use numbers, texts, lists, tuples, dictionaries, "
            "dtypes or small tensors; per-tensor state belongs into the model or the optimizer."
        ) from None
