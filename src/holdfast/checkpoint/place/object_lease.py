"""One job per place of checkpoints in an object store, where nothing can be locked.

An object can be written only if none is there, and that is all that is needed: leases are numbered, and whoever puts
the next number holds the place. A job takes over a lease that nobody renews by putting the number after it, so of
several that try one succeeds; the job that was thought dead finds a higher number, or its own lease gone, and stops.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from pathlib import Path
from typing import Any

from holdfast import patience
from holdfast.checkpoint.errors import DirectoryTaken, PlaceLost
from holdfast.checkpoint.place.lease import Lease, holder_text, lost, parsed_holder, taken, waiting_words
from holdfast.checkpoint.place.renewal import RenewedLease, Told, after_silence
from holdfast.checkpoint.place.storage import Storage
from holdfast.files import died_here, is_of_here


class ObjectLease(RenewedLease):
    """Held by rank 0 for the length of a block.

    Args:
        storage: The place.
        of: What in the place is held; default: all of it. Leases of different things do not exclude each other.
        notify: As of `Lease`.
    """

    def __init__(self, storage: Storage, of: str = "", notify: Told | None = None) -> None:
        super().__init__("holdfast-object-lease")
        self._storage = storage
        self._prefix = f".lease-{of}." if of else ".lease-"
        self._place = f"{storage.root}/{of}".rstrip("/")
        self._notify = notify
        self._token = uuid.uuid4().hex
        self._turn = 0
        self._lost = False

    def __enter__(self) -> ObjectLease:
        """Take the lease.

        Raises:
            DirectoryTaken: Another job holds it, or was faster.
        """
        before = self._turns()
        self._refuse_living(before, self._notify)
        self._turn = max(before, default=0) + 1
        try:
            self._storage.put_new(self._name(self._turn), self._text())
        except FileExistsError:
            raise DirectoryTaken(taken(self._place, self._holder(self._turn))) from None
        try:
            # Others may have come and gone since the first look, and one may have begun again at the lowest number.
            other_turns = [turn for turn in self._turns() if turn != self._turn]
            self._refuse_living(other_turns)
            self._refuse_overwritten()
            for turn in other_turns:
                self._storage.remove(self._name(turn))
        except BaseException:
            self._give_back()
            raise
        self._begin()
        return self

    def _refuse_overwritten(self) -> None:
        """Refuse the place where the store let two jobs put one number: not every store looks and writes in one act."""
        holder = self._holder(self._turn)
        if holder.get("token") != self._token:
            raise DirectoryTaken(taken(self._place, holder))

    def check(self) -> None:
        """Refuse to go on where another job has taken over.

        Raises:
            PlaceLost: This job was not heard of for too long, and another one writes there by now.
            OSError: The store does not answer.
        """
        if self._lost or not self._is_mine() or self._is_overtaken():
            self._lost = True
            holder: dict[str, Any] = {}
            with contextlib.suppress(OSError):
                holder = self._holder(max(self._turns(), default=self._turn))
            raise PlaceLost(lost(self._place, holder))

    def _is_mine(self) -> bool:
        return self._holder(self._turn).get("token") == self._token

    def _is_overtaken(self) -> bool:
        """Whether there is a higher number, and still is after a while: who finds this job alive withdraws his own."""
        if max(self._turns(), default=0) <= self._turn:
            return False
        time.sleep(patience.current.lease_withdraw_seconds)
        return max(self._turns(), default=0) > self._turn

    def _give_back(self) -> None:
        with contextlib.suppress(OSError):  # a store that is gone must not hide why the run ends; the lease gets stale
            if self._is_mine():
                self._storage.remove(self._name(self._turn))

    def _renew(self) -> None:
        if self._lost or not self._is_mine():
            self._lost = True  # the next save says so
            return
        self._storage.replace(self._name(self._turn), self._text())

    def _refuse_living(self, turns: list[int], notify: Told | None = None) -> None:
        holder = self._living(turns)
        if notify is not None and holder and not is_of_here(holder):
            notify(waiting_words(self._place, holder))
            holder = after_silence(holder, lambda: self._living(turns))
        if holder:
            raise DirectoryTaken(taken(self._place, holder))

    def _living(self, turns: list[int]) -> dict[str, Any]:
        """Return who holds one of these turns and may live; empty if nobody does."""
        for turn in turns:
            holder = self._holder(turn)
            if holder and not died_here(holder) and self._age(turn, holder) < patience.current.lease_stale_seconds:
                return holder
        return {}

    def _age(self, turn: int, holder: dict[str, Any]) -> float:
        try:
            return self._storage.age(self._name(turn))
        except FileNotFoundError:  # given back in the meantime
            return patience.current.lease_stale_seconds
        except NotImplementedError:  # a store that does not tell when an object was written
            written = holder.get("time")
            return time.time() - (written if isinstance(written, int | float) else 0)

    def _turns(self) -> list[int]:
        pattern = re.compile(re.escape(self._prefix) + r"(\d{8})\.json")
        return [int(match.group(1)) for name in self._storage.names() if (match := pattern.fullmatch(name))]

    def _name(self, turn: int) -> str:
        return f"{self._prefix}{turn:08d}.json"

    def _text(self) -> bytes:
        return holder_text(token=self._token)

    def _holder(self, turn: int) -> dict[str, Any]:
        """Return who holds a turn; empty if it was given back in the meantime, or is damaged."""
        try:
            return parsed_holder(self._storage.read(self._name(turn)))
        except FileNotFoundError:
            return {}


def lease_of(storage: Storage) -> Lease | ObjectLease:
    """Return the lease of a place of checkpoints, of either kind."""
    return Lease(Path(storage.root)) if storage.renames else ObjectLease(storage)
