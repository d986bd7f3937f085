"""What leases have in common: a thread renews them while they are held."""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType

STALE_SECONDS = 120.0
"""A lease of another host that was not renewed for this long is dead."""
RENEW_SECONDS = 15.0


class Renewed:
    """A lease that is renewed from its taking, where a subclass calls `_begin`, to the end of its block."""

    def __init__(self, name: str) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_renewing, name=name, daemon=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back."""
        self._stop.set()
        self._thread.join()
        self._give_back()

    def _begin(self) -> None:
        self._thread.start()

    def _keep_renewing(self) -> None:
        while not self._stop.wait(RENEW_SECONDS):
            # File systems and stores raise errors of many kinds, and the next time may do better; a dead one is
            # noticed by the saves.
            with contextlib.suppress(Exception):
                self._renew()

    def _renew(self) -> None:
        """Write that the holder lives."""
        raise NotImplementedError

    def _give_back(self) -> None:
        """Let others take it; raises nothing, since why the block ends matters more."""
        raise NotImplementedError
