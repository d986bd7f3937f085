"""Saves of somebody else's loop that go on while it trains.

saving = checkpoint.save_in_background("run/step-00000100", model, optimizer, extra={"step": 100})
...                        # train on; the tensors were copied
manifest = saving.result() # waits; raises what the save failed of, the same on all ranks
"""

from __future__ import annotations

import atexit
import sys
from typing import Any, Unpack

from torch import nn
from torch.optim import Optimizer

from holdfast.checkpoint.background import BackgroundSaver
from holdfast.checkpoint.calls import Others, call, prepared
from holdfast.checkpoint.errors import SaveFailed
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.snapshot import Snapshot
from holdfast.errors import HoldfastError

_NAME = "save_in_background"


class PendingSave:
    """A save that was begun; a process that ends normally finishes it first."""

    def __init__(self, path: str, saver: BackgroundSaver[Manifest]) -> None:
        self.path = path
        self.asked = False
        """Whether this rank has heard what became of it."""
        self._saver = saver
        self._outcome: Manifest | HoldfastError | None = None

    @property
    def done(self) -> bool:
        """Whether this rank has ended it, well or not; other ranks may be a little earlier or later."""
        return self._outcome is not None or self._saver.status != "running"

    def result(self) -> Manifest:
        """Wait for the end and return what was written.

        Raises:
            SaveFailed, DirectoryTaken: As `save`.
        """
        outcome = self.outcome()
        self.asked = True
        if isinstance(outcome, HoldfastError):
            raise outcome
        return outcome

    def outcome(self) -> Manifest | HoldfastError:
        """Wait for the end and return what was written, or why nothing was."""
        if self._outcome is None:
            try:
                self._outcome = self._saver.collect()
            except HoldfastError as error:
                self._outcome = error
        assert self._outcome is not None
        return self._outcome


_saver: BackgroundSaver[Manifest] = BackgroundSaver()
"""One save is in flight at a time, and its buffers serve the next one."""
_newest: list[PendingSave] = []


@atexit.register
def _tell_unheard() -> None:
    """Say at the end what nobody has asked for: a loop's last save may have failed."""
    for saving in _newest:
        outcome = saving.outcome()
        if isinstance(outcome, HoldfastError) and not saving.asked:
            print(f"{saving.path} was not saved: {outcome}", file=sys.stderr, flush=True)


def save_in_background(
    path: str,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    *,
    timeout_minutes: float = 30.0,
    **others: Unpack[Others],
) -> PendingSave:
    """Copy what `save` would write and return; a thread writes it, over a process group of its own.

    One save is in flight at a time: the one before is waited for. Ask for the result before the process group is
    destroyed.

    Args:
        path, model, optimizer, extra, timeout_minutes: As in `save`.
        others: rank_extra, assets, frozen and parent, as in `save`.

    Raises:
        SaveFailed, DirectoryTaken: The save before failed, and nobody had asked for its result; on all ranks. Nothing
            was begun.
        UnsavableExtra, UnsavableOptimizer: On all ranks; something on one of them has no written form.
    """
    before = _newest[-1] if _newest else None
    outcome = None if before is None else before.outcome()
    with call(_NAME, timeout_minutes, SaveFailed, "background") as (ranks, _):
        failure = outcome if isinstance(outcome, HoldfastError) else None
        answers = ranks.gather((failure, before is None or before.asked))
        _newest.clear()
        first = next((error for error, _ in answers if error is not None), None)
        if first is not None and not all(asked for _, asked in answers):
            raise first
        prepared_save = prepared(ranks, path, model, optimizer, extra, **others)

    def write(copy: Snapshot) -> Manifest:
        with call(_NAME, timeout_minutes, SaveFailed, "background") as (_, reached):
            return prepared_save.committed(copy, ranks, reached)

    _saver.start(prepared_save.snapshot, write)
    _newest.append(PendingSave(path, _saver))
    return _newest[0]
