"""What the calls of somebody else's loop have in common: who takes part, what is saved, where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import PurePosixPath
from typing import Any, TypedDict, Unpack

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from holdfast.checkpoint.errors import SaveFailed
from holdfast.checkpoint.format.manifest import About, Manifest
from holdfast.checkpoint.format.snapshot import Snapshot, hold, mesh_of, take
from holdfast.checkpoint.place.layout import step_of
from holdfast.checkpoint.place.object_lease import ObjectLease
from holdfast.checkpoint.place.storage import Storage, open_storage
from holdfast.checkpoint.save.agreement import together
from holdfast.checkpoint.save.writer import commit
from holdfast.checkpoint.waiting import late_ranks_named
from holdfast.config.versions import versions
from holdfast.errors import HoldfastError, RankFailed, UserError
from holdfast.optim.tagged import UnknownType, decode, encode
from holdfast.parallel.collectives import ProcessExchange
from holdfast.parallel.failure.classify import broken_by_peer


class UnsavableExtra(UserError):  # noqa: N818 - the name says what is wrong
    """`extra` holds a type that has no written form."""


@contextmanager
def call(
    name: str, timeout_minutes: float, raised: type[HoldfastError], aside: str = ""
) -> Iterator[tuple[ProcessExchange, Callable[[str], None]]]:
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
            if key not in _exchanges:
                _exchanges[key] = ProcessExchange(timedelta(minutes=timeout_minutes))
            yield _exchanges[key], reached
    except (SaveFailed, RankFailed) as error:
        if error.__cause__ is not None and broken_by_peer(error.__cause__):
            _exchanges.pop(key, None)  # its sockets are closed
        raise


_exchanges: dict[tuple[object, float, str], ProcessExchange] = {}
"""By world, time-out and purpose: a process group is made once and kept."""


def forget_exchanges() -> None:
    """Let the next calls make process groups of their own."""
    _exchanges.clear()


def place_of(path: str) -> tuple[Storage, str]:
    """Split a checkpoint's path into the storage it is in and its name there."""
    scheme, colon, rest = str(path).rpartition("://")
    whole = PurePosixPath(rest)
    return open_storage(f"{scheme}{colon}{whole.parent}"), whole.name


@dataclass(frozen=True)
class Prepared:
    """A checkpoint that is about to be written."""

    storage: Storage
    name: str
    snapshot: Snapshot
    """Of the live tensors."""
    about: About

    def committed(self, snapshot: Snapshot, ranks: ProcessExchange, reached: Callable[[str], None]) -> Manifest:
        """Write a snapshot, this one or a copy of it; all ranks call this together."""
        with ExitStack() as stack:
            with together(ranks, "begin"):
                if ranks.rank == 0 and not self.storage.renames:
                    stack.enter_context(ObjectLease(self.storage, self.name))
            return commit(snapshot, self.storage, self.about, ranks, name=self.name, reached=reached)


class Others(TypedDict, total=False):
    """What `save` takes besides, where it is not what it usually is."""

    rank_extra: Any
    assets: Mapping[str, bytes] | None
    frozen: bool
    parent: Manifest | None


def prepared(
    ranks: ProcessExchange,
    path: str,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Any,
    **others: Unpack[Others],
) -> Prepared:
    """Look at what `save` was given; arguments are its own.

    Raises:
        UnsavableExtra, UnsavableOptimizer: On all ranks.
    """
    with ranks.together():
        storage, name = place_of(path)
        snapshot = take(
            hold(model, frozen=others.get("frozen", True)),
            optimizer,
            shared={"extra": tagged(extra)},
            rank_state={"extra": tagged(others.get("rank_extra"))},
            assets=others.get("assets"),
        )
    parent = others.get("parent")
    about = About(
        run_id=storage.root,
        step=step_of(name) or 0,
        parent=None if parent is None else parent.hash,
        parent_step=None if parent is None else parent.step,
        mesh=mesh_of(model),
        versions=versions(),
    )
    return Prepared(storage, name, snapshot, about)


def check_extra(shared: Mapping[str, Any], rank_state: Mapping[str, Any] | None) -> None:
    """Refuse an `extra` that cannot be read, before anything live is touched."""
    decode((shared if rank_state is None else rank_state).get("extra"))


def tagged(value: Any) -> Any:
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
