"""Background saves: tensors are copied once, and a thread writes the copy; one save at a time, no failure is lost."""

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
"""Name of the thread; a rank that ends looks for a thread of this name that hangs in a file system."""


class BackgroundSaver(Generic[Written]):
    """Runs one save at a time on a thread, over a process group that nothing else uses.

    A failure is the same on all ranks, but threads end at different times. Ranks therefore compare `status` between
    steps, and collect the outcome once the save has ended on all of them.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._result: Written | None = None
        self._error: HoldfastError | None = None

    @property
    def status(self) -> Status:
        """State of the save on this rank."""
        if self._thread is None:
            return "idle"
        if self._thread.is_alive():
            return "running"
        return "failed" if self._error is not None else "done"

    def start(self, snapshot: Snapshot, write: Callable[[Snapshot], Written], *, copy: bool = True) -> None:
        """Copy the snapshot's tensors and write the copies on a thread; the previous save must have been collected.

        Args:
            snapshot: Snapshot of the live tensors.
            write: Writes a snapshot; called on the thread.
            copy: False for a caller that waits for the end and changes no tensor until then.
        """
        assert self._thread is None, "one save is in flight; collect it first"
        to_write = staged(snapshot, self._buffers) if copy else snapshot
        self._result = self._error = None

        def work() -> None:
            try:
                self._result = write(to_write)
            except HoldfastError as error:
                self._error = error
            except BaseException as error:  # noqa: BLE001 - the edge of a thread
                self._error = SaveFailed(f"the save in the background failed: {type(error).__name__}: {error}.")
                self._error.__cause__ = error

        # Not a daemon: a process that ends normally finishes the save first.
        self._thread = threading.Thread(target=work, name=THREAD, daemon=False)
        self._thread.start()

    def abandon(self) -> None:
        """Give up a thread that hangs; its buffers are not reused, since it may still read them."""
        self._thread = None
        self._buffers = {}

    def collect(self) -> Written | None:
        """Wait for the running save and return what `write` returned; None if no save was started.

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
