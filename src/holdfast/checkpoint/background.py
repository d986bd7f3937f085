"""Background saves: tensors are copied once, and a thread writes the copy; one save at a time, no failure is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from holdfast.checkpoint.errors import SaveFailed
from holdfast.checkpoint.format.manifest import Manifest
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
        stream = _stream_of_caller(to_write)
        self._result = self._error = None

        def work() -> None:
            try:
                if stream is not None:
                    torch.accelerator.set_stream(stream)  # sets the device of this thread too
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


def _stream_of_caller(snapshot: Snapshot) -> torch.Stream | None:
    """Return the caller's stream on the device of a snapshot's tensors; None if all of them are on the host.

    A thread begins on the first device, with its default stream. A copy to the host that is queued there does not wait
    for kernels on another stream, so that a checkpoint would hold tensors as they were before the last update.
    """
    device = next((tensor.device for tensor in snapshot.tensors.values() if tensor.device.type == "cuda"), None)
    return None if device is None else torch.accelerator.current_stream(device)


class PendingSave:
    """A save that is written in the background; a process that ends normally waits for it."""

    def __init__(self, path: str, saver: BackgroundSaver[Manifest]) -> None:
        self.path = path
        """Path of the checkpoint, as `save_in_background` received it."""
        self.asked = False
        """Whether the caller has asked for the outcome on this rank."""
        self._saver = saver
        self._outcome: Manifest | HoldfastError | None = None

    @property
    def done(self) -> bool:
        """Whether the save has ended on this rank, with or without success; other ranks may end a little later."""
        return self._outcome is not None or self._saver.status != "running"

    def result(self) -> Manifest:
        """Wait for the end of the save.

        Returns:
            The manifest of the checkpoint.

        Raises:
            SaveFailed, DirectoryTaken: The save failed, as in `save`; the same error at every call.
        """
        outcome = self.outcome()
        self.asked = True
        if isinstance(outcome, HoldfastError):
            raise outcome
        return outcome

    def outcome(self) -> Manifest | HoldfastError:
        """Wait for the end of the save, and raise nothing.

        Returns:
            The manifest of the checkpoint, or the error of a failed save.
        """
        if self._outcome is None:
            try:
                self._outcome = self._saver.collect()
            except HoldfastError as error:
                self._outcome = error
        assert self._outcome is not None
        return self._outcome
