"""Small notes that all ranks of a run can read: files under our launcher, keys of the store elsewhere.

Files need no rank 0 to be alive. Keys go through a connection of the board's own: a call that waits on the store's main
connection would make every thread wait.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # public as torch.distributed.Store, where type checkers do not see it


class Board:
    """One rank's way to the notes.

    Args:
        store: Shared by all ranks.
        directory: The launch directory if there is one.
    """

    def __init__(self, store: Store, directory: Path | None) -> None:
        self._store = store
        self._directory = directory
        self._own: Store | None = None

    def write(self, name: str, text: str) -> None:
        """Leave a note in the place of an earlier one; one that cannot be left is dropped."""
        with contextlib.suppress(OSError, RuntimeError):
            if self._directory is not None:
                staging = self._directory / f".{name}.{os.getpid()}"
                staging.write_text(text)
                staging.replace(self._directory / name)
            else:
                self._connection().set(f"holdfast/board/{name}", text)

    def read(self, name: str) -> str | None:
        """Return a note, None if there is none or its place is gone."""
        with contextlib.suppress(OSError, RuntimeError):
            if self._directory is not None:
                return (self._directory / name).read_text()
            key = f"holdfast/board/{name}"
            connection = self._connection()
            return connection.get(key).decode() if connection.check([key]) else None
        return None

    def _connection(self) -> Store:
        if self._own is None:
            self._own = cast("Store", self._store.clone())  # type: ignore[attr-defined]  # torch's stubs lack it
        return self._own
