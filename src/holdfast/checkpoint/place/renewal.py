"""What leases have in common: a thread renews them while they are held."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any

from holdfast import patience

Told = Callable[[str], object]
"""Told in a line what a start waits for."""


class RenewedLease(ABC):
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
        while not self._stop.wait(patience.current.lease_renew_seconds):
            # File systems and stores raise errors of many kinds, and the next time may do better; a dead one is
            # noticed by the saves.
            with contextlib.suppress(Exception):
                self._renew()

    @abstractmethod
    def _renew(self) -> None:
        """Write that the holder lives."""

    @abstractmethod
    def _give_back(self) -> None:
        """Let others take it; raises nothing, since why the block ends matters more."""


def after_silence(holder: dict[str, Any], living: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return who holds a place once its holder was heard of, or is dead or gone: then nobody, which is empty.

    Args:
        holder: Of another machine, where nobody here can see whether it lives; every renewal changes it.
        living: Returns who holds the place now; empty if nobody does, or the lease is stale.
    """
    deadline = time.monotonic() + patience.current.lease_stale_seconds + patience.current.lease_renew_seconds
    current_holder = holder
    while current_holder == holder and time.monotonic() < deadline:
        time.sleep(patience.current.lease_look_seconds)
        current_holder = living()
    return current_holder
