"""Saves that training does not wait for: one copy, then a thread; never two at once, never a failure unheard."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

from torch import Tensor

from holdfast.checkpoint.errors import SaveFailed
from holdfast.checkpoint.format.snapshot import Snapshot, staged
from holdfast.errors import HoldfastError

Status = Literal["idle", "running", "done", "failed"]
Written = TypeVar("Written")
THREAD = "holdfast-save"
"""Name of the thread; the command line looks for one that hangs when it wants to leave."""


class BackgroundSaver(Generic[Written]):
    """Runs one save at a time on a thread, over a process group that nothing else uses.

    A failure is the same on all ranks, but threads end at different times: ranks compare `status` between steps and
    collect the outcome when all have one.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._result: Written | None = None
        self._error: HoldfastError | None = None

    @property
    def status(self) -> Status:
        """What this rank's thread is doing."""
        if self._thread is None:
            return "idle"
        if self._thread.is_alive():
            return "running"
        return "failed" if self._error is not None else "done"

    def start(self, snapshot: Snapshot, write: Callable[[Snapshot], Written], *, copy: bool = True) -> None:
        """Copy the snapshot's tensors and write the copies on a thread; the save before must be collected.

        Args:
            snapshot: Live tensors.
            write: Writes a snapshot; runs on the thread.
            copy: Off for a caller that waits for the end and changes nothing until then.
        """
        assert self._thread is None, "one save is in flight; collect it first"
        to_write = staged(snapshot, self._buffers) if copy else snapshot
        self._result = self._error = None

        def work() -> None:
            try:
                self._result = write(to_write)
            except HoldfastError as error:
                self._error = error
            except BaseException as error:  # noqa: BLE001 - the edge of a thread; CheckpointException is not an Exception
                self._error = SaveFailed(f"the save in the background failed: {type(error).__name__}: {error}.")
                self._error.__cause__ = error

        # Not a daemon: a process that ends normally finishes the save first.
        self._thread = threading.Thread(target=work, name=THREAD, daemon=False)
        self._thread.start()

    def abandon(self) -> None:
        """Forget the thread; its buffers are its own from now on."""
        self._thread = None
        self._buffers = {}

    def collect(self) -> Written | None:
        """Wait for the save in flight and return what it returned; None if there was none.

        Raises:
            HoldfastError: The save failed.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._result
