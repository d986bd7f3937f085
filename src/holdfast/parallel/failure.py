"""The first cause of a failure reaches every rank: which rank, in which phase, of what.

A rank that fails leaves a report before its sockets close; a rank whose collective breaks looks for a report of
another one and raises `RankFailed` with it instead of "connection closed by peer". Reports travel by two ways: the
store, where the first writer wins, and, under our launcher, one file per rank in the launch directory. The files
matter when rank 0 dies, since it hosts the store; the launcher writes one for a rank that died without a word.

Invariant: no survivor waits more than 10 s for news of a failure, not even one that is in no collective (a long
rollout) or in one that cannot notice (NCCL between GPUs of one machine): a thread looks, and ends such a rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, cast

from holdfast.errors import RankFailed, RunStopped, UserError
from holdfast.parallel.beside import BesideLoop, given_up
from holdfast.parallel.board import Board
from holdfast.parallel.broken import broken_by_peer, is_broken, timed_out
from holdfast.parallel.heartbeat import Heartbeat

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # public as torch.distributed.Store, where type checkers do not see it

_KEY = "holdfast/failure"
_HEARD_KEY = "holdfast/failure/heard"
_SEARCH_SECONDS = 2.0
_STORE_AFTER_SECONDS = 0.5
_LOOK_SECONDS = 0.5
_LINGER_SECONDS = 1.5
_LONGEST_MESSAGE = 4000
_PHASE_BYTES = 64
_SAVE_NOTE = "save-asked-for"


@dataclass(frozen=True)
class Failure:
    """One rank's last words, or what is known of a rank that had none."""

    rank: int
    """-1: unknown, a peer died without a word and nobody saw which."""
    kind: Literal["error", "user", "peer", "silent"]
    """error: its own. user: a UserError. peer: it lost another rank. silent: it died and somebody else says so."""
    phase: str
    type: str
    message: str
    step: int | None
    time: float
    """Seconds since the epoch."""

    def sentence(self) -> str:
        """Return what a survivor tells its user."""
        where = f" in phase {self.phase!r}" if self.phase else ""
        where += f" at step {self.step}" if self.step is not None else ""
        who = f"Rank {self.rank}" if self.rank >= 0 else "Another rank"
        if self.kind == "silent":
            did = "hangs" if self.type == "Hang" else "died without a word"
            return f"{who} {did}{where}: {self.message}."
        return f"{who} failed{where}: {self.type}: {self.message}"


@dataclass(frozen=True)
class KillPoint:
    """Where a proof kills this rank with SIGKILL: as hard as a power cut, and at a known place."""

    step: int
    """Update in which it happens, counted from 1."""
    phase: str
    """As `FailureChannel.phase` names it; of a save, "save: " and the save's phase."""


class FailureChannel:
    """One rank's end of the channel; wrap the whole of a rank's work in `guard`.

    Args:
        store: Shared by all ranks.
        rank: Own number.
        world_size: Ranks of the run.
        directory: The launch directory when all ranks run on this machine under our launcher, else None.
        kill: Where a proof kills this rank.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        directory: Path | None = None,
        kill: KillPoint | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self.directory = directory
        """Where our launcher and its ranks leave notes for each other; None without it."""
        self._kill = kill
        self._phase = ""
        self._step: int | None = None
        self._files: dict[str, int] = {}
        self._heard: Failure | None = None
        """What this rank's watching thread learned: the store may be gone when the main thread asks."""
        self._board = Board(store, directory)
        self._heartbeat = Heartbeat(rank, world_size, self._board, self._whereabouts)
        self._beside = BesideLoop(rank, world_size, self._board, self._heartbeat)

    def phase(self, name: str) -> _Phase:
        """Enter a phase now; used as a context manager, the earlier phase returns at its end.

        An exception leaves the phase as it was where it was raised, so that the report names it.
        """
        earlier = self._phase
        self._set_phase(name)
        return _Phase(self, earlier)

    def _set_phase(self, name: str) -> None:
        self._phase = name
        self._write_in_place(f"phase-rank-{self._rank}", name)
        self._maybe_die(name)

    def _maybe_die(self, phase: str) -> None:
        kill = self._kill
        if kill is not None and self._step is not None and self._step + 1 >= kill.step and phase == kill.phase:
            os.kill(os.getpid(), signal.SIGKILL)

    def in_background(self, name: str) -> None:
        """Record what a thread beside the loop does, such as a phase of a save."""
        if self.directory is not None:
            self._write_in_place(BesideLoop.note(self._rank), name)
        elif self._world_size > 1:
            self._board.write(BesideLoop.note(self._rank), name)
        self._maybe_die(f"save: {name}")

    def late_in_background(self, phase: str) -> str:
        """Return words about the ranks that a save waited for in vain; empty if all came meanwhile.

        A rank that has stopped answering is reported to all, since no training step can go on without it.
        """
        self.in_background(given_up(phase))
        silent, words = self._beside.late()
        if silent:
            first = silent[0]
            text = f"it kept a save waiting until its time was over ({words})"
            hang = Failure(first.rank, "silent", first.phase, "Hang", text, first.step, time.time())
            self._write_file(hang)
            self._write_store(hang)
        return words

    def at_step(self, step: int) -> None:
        """Record the step; rank 0's is what the launcher compares between two deaths."""
        self._step = step
        if self._rank == 0:
            self._write_in_place("step", str(step))

    def _write_in_place(self, name: str, text: str) -> None:
        """Overwrite a small file of fixed size without opening it again: about 2 µs, since phases change often."""
        if self.directory is None:
            return
        with contextlib.suppress(OSError):  # a full disk must not stop a run; the messages then lack the phase
            if name not in self._files:
                self._files[name] = os.open(self.directory / name, os.O_WRONLY | os.O_CREAT, 0o644)
            line = text.encode()[: _PHASE_BYTES - 1].ljust(_PHASE_BYTES - 1) + b"\n"
            os.pwrite(self._files[name], line, 0)

    def _whereabouts(self) -> tuple[int | None, str]:
        return self._step, self._phase

    def broken_by_peer(self, error: BaseException) -> bool:
        """Return whether an error says that another rank is gone."""
        return self._world_size > 1 and broken_by_peer(error)

    def ask_for_save(self, run: str) -> None:
        """Ask all ranks to save what they hold of a run: this one is about to fail and still can."""
        self._board.write(f"{_SAVE_NOTE}-{run}", str(self._rank))

    def save_is_asked_for(self, run: str) -> bool:
        """Return whether some rank asked."""
        return self._board.read(f"{_SAVE_NOTE}-{run}") is not None

    def report(self, error: BaseException) -> Failure:
        """Leave this rank's last words; return the failure that counts: the first one, perhaps another rank's."""
        kind: Literal["user", "error"] = "user" if isinstance(error, UserError) else "error"
        own = self._last_words(kind, error)
        self._write_file(own)
        return self._write_store(own)

    def _last_words(self, kind: Literal["user", "error", "peer"], error: BaseException) -> Failure:
        message = str(error).strip()[:_LONGEST_MESSAGE] or "(no message)"
        return Failure(self._rank, kind, self._phase, type(error).__name__, message, self._step, time.time())

    def _write_file(self, failure: Failure) -> None:
        if self.directory is None:
            return
        target = self.directory / f"failure-rank-{failure.rank}.json"
        staging = target.with_suffix(f".staging-{self._rank}")
        with contextlib.suppress(OSError):  # a full disk may be the very failure: the store carries the report too
            staging.write_text(json.dumps(asdict(failure)))
            staging.replace(target)

    def _write_store(self, failure: Failure) -> Failure:
        try:
            first = self._store.compare_set(_KEY, "", json.dumps(asdict(failure)))
        except RuntimeError:  # its host died: the files remain
            return failure
        return _parse(first) or failure

    def first_failure(self, wait_seconds: float) -> Failure | None:
        """Return the first failure that another rank reported, waiting for it if there is none yet.

        The store is asked late where files are at hand: when its host died each question prints a page of C++ frames.
        """
        began = time.monotonic()
        store_lives = True
        while True:
            failure = self._heard or self._first_in_files()
            waited = time.monotonic() - began
            if failure is None and store_lives and (self.directory is None or waited >= _STORE_AFTER_SECONDS):
                failure, store_lives = self._first_in_store(self._store)
            if failure is not None or waited >= wait_seconds:
                return failure
            time.sleep(0.05)

    def _first_in_files(self) -> Failure | None:
        if self.directory is None:
            return None
        found = [_parse(_read(path)) for path in self.directory.glob("failure-rank-*.json")]
        others = [one for one in found if one is not None and one.kind != "peer" and one.rank != self._rank]
        return min(others, key=lambda one: one.time, default=None)

    def _first_in_store(self, store: Store) -> tuple[Failure | None, bool]:
        try:
            failure = _parse(store.get(_KEY)) if store.check([_KEY]) else None
        except RuntimeError:
            return None, False
        return (failure if failure is not None and failure.rank != self._rank else None), True

    @contextlib.contextmanager
    def guard(self, search_seconds: float = _SEARCH_SECONDS, exit_seconds: float = 5.0) -> Iterator[None]:
        """Report what goes wrong inside, and raise RankFailed in place of a collective that another rank broke.

        Args:
            search_seconds: Longest wait for another rank's report once a collective broke.
            exit_seconds: When another rank has failed and this one has not left the guard after so long, it prints
                the cause and ends with RankFailed's exit code, since nothing can interrupt a blocked collective.
        """
        stop = threading.Event()
        watcher = threading.Thread(
            target=self._watch, args=(stop, exit_seconds), name="holdfast-failure-watch", daemon=True
        )
        if self._world_size > 1:
            watcher.start()
            self._heartbeat.start()
        try:
            yield
        except (RunStopped, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except RankFailed as error:
            self._write_file(self._last_words("peer", error))
            self._linger()
            raise
        except BaseException as error:  # DCP's CheckpointException is no Exception
            try:
                self._raise_as_rank_failed(error, search_seconds)
                self.report(error)
            finally:
                self._linger()
            raise
        finally:
            stop.set()
            self._heartbeat.stop()
            if watcher.ident is not None:
                watcher.join(timeout=1.0)
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()

    def _raise_as_rank_failed(self, error: BaseException, search_seconds: float) -> None:
        if isinstance(error, UserError) or not self.broken_by_peer(error):
            return
        # Looked for before this rank says that it goes: the launcher ends the others soon after it does.
        hang = self._hang(error)
        if hang is not None:
            self._write_file(hang)
        self._write_file(self._last_words("peer", error))
        failure = self.first_failure(search_seconds if hang is None else 0.0) or hang
        if failure is None and not is_broken(error):
            return  # a broken connection was handled on the way to another error: that one counts
        if failure is None:
            text = f"its connections closed, perhaps it was killed; rank {self._rank} saw it: {error}"
            failure = Failure(-1, "silent", "", "Death", text[:_LONGEST_MESSAGE], self._step, time.time())
            # The next survivor to lose a connection loses it to this rank, and must hear of the first death.
            failure = self._write_store(failure)
        raise RankFailed(self._news(failure)) from error

    def _hang(self, error: BaseException) -> Failure | None:
        """Return which rank kept this one waiting until its time was over; None if that is not what happened."""
        missing = self._heartbeat.missing() if timed_out(error) else []
        if not missing:
            return None
        first, told = missing[0], "; ".join(place.words() for place in missing)
        text = f"it kept the others waiting until their time was over ({told})"
        return Failure(first.rank, "silent", first.phase, "Hang", text, first.step, time.time())

    def _linger(self) -> None:
        """Stay until all ranks have heard: this one may host the store, or be the peer whose end they notice first."""
        if self._world_size == 1 or self.directory is not None:
            return
        deadline = time.monotonic() + _LINGER_SECONDS  # a dead rank never hears
        with contextlib.suppress(RuntimeError):
            if self._heard is None:
                self._store.add(_HEARD_KEY, 1)
            while self._store.add(_HEARD_KEY, 0) < self._world_size and time.monotonic() < deadline:
                time.sleep(0.05)

    def _news(self, failure: Failure) -> str:
        own = f" in phase {self._phase!r}" if self._phase else ""
        return (
            f"{failure.sentence()}\nRank {self._rank} therefore stops{own}. "
            "The same command starts the run again, from its newest verified checkpoint."
        )

    def _watch(self, stop: threading.Event, exit_seconds: float) -> None:
        # A connection of its own: a call that waits on the store's own connection would make this thread wait too.
        store: Store | None = None
        if self.directory is None:
            with contextlib.suppress(RuntimeError):
                store = cast("Store", self._store.clone())  # type: ignore[attr-defined]  # torch's stubs lack it
        while not stop.wait(_LOOK_SECONDS):
            failure = self._first_in_files()
            if failure is None and store is not None:
                failure, lives = self._first_in_store(store)
                store = store if lives else None
            if failure is None:
                continue
            self._heard = failure
            if store is not None:
                with contextlib.suppress(RuntimeError):
                    store.add(_HEARD_KEY, 1)
            # Ranks that refuse a configuration all raise the same error, each in its own time.
            if failure.kind != "user" and not stop.wait(exit_seconds):
                self._end_process(failure)
            return

    def _end_process(self, failure: Failure) -> None:
        error = RankFailed(self._news(failure))
        self._write_file(self._last_words("peer", error))
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
        os._exit(RankFailed.exit_code)


class _Phase:
    """Returns a channel to its earlier phase, unless an exception passes."""

    __slots__ = ("_channel", "_earlier")

    def __init__(self, channel: FailureChannel, earlier: str) -> None:
        self._channel = channel
        self._earlier = earlier

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._channel._set_phase(self._earlier)


def _parse(text: bytes | str) -> Failure | None:
    try:
        return Failure(**json.loads(text))
    except (ValueError, TypeError):  # torn, or of another version: as good as none
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
