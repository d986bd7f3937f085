"""Tell every rank the first cause of a failure: which rank failed, in which phase, and with which error.

A rank that fails writes a report before its sockets close (`parallel/failure/reports.py`). A rank whose collective
breaks looks for another rank's report and raises `RankFailed` with it instead of "connection closed by peer".

Invariant: no survivor waits more than 10 s to learn of a failure. A survivor may be in no collective (during a long
rollout), or in one that cannot notice (NCCL between GPUs of one machine). Two threads see to it: one beats and reads
what others wrote, and one that no network call can block ends a rank that does not leave by itself.

Background saves run collectives of their own, so each rank also writes a note of its save's phase. A process that has
stopped answering is distinguished from one whose save thread alone is late: training can wait for the latter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from holdfast import patience
from holdfast.errors import RankFailed, RunStopped, UserError, how_to_go_on
from holdfast.parallel.failure.classify import broken_by_peer, is_broken, timed_out
from holdfast.parallel.failure.heartbeat import MISSED_BEATS, Heartbeat, Silence, SilenceWatch, silences
from holdfast.parallel.failure.reports import DISK_ERRORS, HANG, LONGEST_MESSAGE, Failure, NoteBoard, Reports

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # public as torch.distributed.Store, where type checkers do not see it

Listener = Callable[[str, Failure], None]
"""Called with "silent" or "failed" and a description of the rank that it happened to."""

_PHASE_BYTES = 64
_GIVEN_UP = ", given up"
"""What a rank adds to the phase of its save in which it waited in vain for others."""


@dataclass(frozen=True)
class KillPoint:
    """The step and phase in which `holdfast prove` kills this rank with SIGKILL, to imitate a power cut."""

    step: int
    """Update in which it happens, counted from 1."""
    phase: str
    """A name that `FailureChannel.phase` is called with; for a phase of a save, "save: " and its name."""


class FailureChannel:
    """One rank's end of the channel; wrap the whole of a rank's work in `guard`.

    Args:
        store: Store that all ranks share.
        rank: Rank of this process.
        world_size: Number of ranks.
        directory: The launch directory when all ranks run on this machine under our launcher, else None.
        kill: Point at which `holdfast prove` kills this rank.
        host: Name of this machine for error messages; empty under our launcher, where all ranks share one.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        directory: Path | None = None,
        kill: KillPoint | None = None,
        host: str = "",
    ) -> None:
        self._rank = rank
        self._host = host
        self._world_size = world_size
        self.directory = directory
        """Launch directory, through which our launcher and its ranks exchange notes; None without our launcher."""
        self._kill = kill
        self._leaving = threading.Event()
        self._phase = self._last_phase = ""
        self._step: int | None = None
        self._files: dict[str, int] = {}
        self._board = NoteBoard(store, directory)
        self.reports = Reports(self._board, store, rank, world_size, directory)
        """Failure reports of all ranks."""
        self._heartbeat = Heartbeat(rank, world_size, self._board, self._position, host, self.reports.look)
        self._silence = SilenceWatch(self._heartbeat.sightings, host, self._silent) if host else None
        self.listener: Listener | None = None
        """Called when another rank fails or falls silent, on the lowest rank that still beats, from any thread."""

    def phase(self, name: str) -> _Phase:
        """Enter a phase; used as a context manager, restore the earlier phase at the end of the block.

        After an exception the phase is not restored, so that the failure report names the phase that raised.
        """
        earlier = self._phase
        self._set_phase(name)
        return _Phase(self, earlier)

    def _set_phase(self, name: str) -> None:
        self._phase = name
        self._last_phase = name or self._last_phase
        self._write_in_place(f"phase-rank-{self._rank}", name)
        self._maybe_die(name)

    def _maybe_die(self, phase: str) -> None:
        kill = self._kill
        if kill is not None and self._step is not None and self._step + 1 >= kill.step and phase == kill.phase:
            # SIGKILL runs no handler and no `finally`, as the kernel's out-of-memory killer would end the rank.
            os.kill(os.getpid(), signal.SIGKILL)

    def in_background(self, name: str) -> None:
        """Record the phase of a background save, which runs in a thread beside the training loop."""
        note = f"background-rank-{self._rank}"
        self._write_in_place(note, name)
        if self.directory is None and self._world_size > 1:
            self._board.write(note, name)
        self._maybe_die(f"save: {name}")

    def late_in_background(self, phase: str) -> str:
        """Describe the ranks that did not arrive in a phase of a save before its time-out; empty if all have by now.

        Takes a few seconds, in which the marks of ranks that waited in vain arrive; the late ranks are those without. A
        rank that has stopped answering is reported to all ranks, since no training step can go on without it.
        """
        self.in_background(phase + _GIVEN_UP)
        silent = self._heartbeat.silent()
        notes = {rank: self._board.read(f"background-rank-{rank}") or "" for rank in range(self._world_size)}
        saves = {rank: note.strip() for rank, note in notes.items() if rank != self._rank}
        if not silent:
            late = [rank for rank, save in saves.items() if not save.endswith(_GIVEN_UP)]
            return "; ".join(f"rank {rank} is {_in_save(saves[rank])}" for rank in late)
        description = "; ".join(f"{state.words()}, {_in_save(saves[state.rank])}" for state in silent)
        text = f"it kept a save waiting until its time was over ({description})"
        self.reports.write(silent[0].failure(HANG, text))
        return description

    def at_step(self, step: int) -> None:
        """Record the step. Where two attempts died at the same step of rank 0, the launcher does not restart."""
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
            # One pwrite of a fixed size: a reader sees the old line or the new one, and a rank that is killed leaves no
            # torn file.
            os.pwrite(self._files[name], line, 0)

    def _position(self) -> tuple[int | None, str]:
        return self._step, self._last_phase

    def broken_by_peer(self, error: BaseException) -> bool:
        """Return whether an error says that another rank is gone."""
        return self._world_size > 1 and broken_by_peer(error)

    def all_ranks_raise(self, run: str) -> bool:
        """Return whether all ranks of a run raise within `raising_seconds`; each of them calls this when it does."""
        if self._world_size == 1:
            return True
        notes = [f"raises-{run}-rank-{rank}" for rank in range(self._world_size)]
        self._board.write(notes[self._rank], "")
        deadline = time.monotonic() + patience.current.raising_seconds
        while any(self._board.read(note) is None for note in notes):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def report(self, error: BaseException) -> Failure:
        """Report an error of this rank; return the first failure of the run, which may be another rank's."""
        kind: Literal["user", "error"] = "user" if isinstance(error, UserError) else "error"
        return self.reports.write(self._last_words(kind, error))

    def _last_words(self, kind: Literal["user", "error", "peer"], error: BaseException) -> Failure:
        message = str(error).strip()[:LONGEST_MESSAGE] or "(no message)"
        origin = (self._step, time.time(), self._host)
        of_disk = isinstance(error, OSError) and error.errno in DISK_ERRORS
        return Failure(self._rank, kind, self._phase, type(error).__name__, message, *origin, of_disk)

    def own(self, error: BaseException) -> Failure:
        """Return an error of this rank with its rank, phase and machine."""
        return self._last_words("error", error)

    def _silent(self, silence: Silence, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"warning: {message}", file=sys.stderr, flush=True)
        self._pass_on_in_time("silent", replace(silence.failure(), message=message))

    def _pass_on_in_time(self, event: str, failure: Failure) -> None:
        """Pass an event on without waiting long: a listener writes a file, perhaps to the machine that was lost."""
        thread = threading.Thread(target=self._pass_on, args=(event, failure), daemon=True)
        thread.start()
        thread.join(patience.current.failure_exit_seconds / 5)

    def _pass_on(self, event: str, failure: Failure) -> None:
        silent = self._heartbeat.sightings.silent_for(time.monotonic())
        limit = MISSED_BEATS * patience.current.beat_seconds
        lower = [rank for rank in range(self._rank) if silent.get(rank, limit) < limit]
        if self.listener is not None and not lower:
            self.listener(event, failure)

    @contextlib.contextmanager
    def guard(self, search_seconds: float | None = None, exit_seconds: float | None = None) -> Iterator[None]:
        """Report what goes wrong inside, and raise RankFailed in place of a collective that another rank broke.

        Args:
            search_seconds: Longest wait for another rank's report once a collective broke; None: as `patience` has it.
            exit_seconds: Time to leave the guard after another rank failed, and three times that after a refusal; then
                this one prints the cause and ends with RankFailed's exit code, since nothing can interrupt a blocked
                collective. None: as `patience` has it.
        """
        search_seconds = self._search_seconds if search_seconds is None else search_seconds
        exit_seconds = patience.current.failure_exit_seconds if exit_seconds is None else exit_seconds
        # A run that fails leaves SIGTERM ignored until its cause is known.
        before = signal.getsignal(signal.SIGTERM)
        watcher = threading.Thread(target=self._watch, args=(exit_seconds,), name="holdfast-failure-watch", daemon=True)
        if self._world_size > 1:
            self._heartbeat.start()
            watcher.start()
        try:
            yield
        except (RunStopped, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except RankFailed as error:
            self.reports.write_file(self._last_words("peer", error))
            self.reports.linger()
            raise
        except BaseException as error:  # DCP's CheckpointException is not an Exception
            try:
                self._raise_as_rank_failed(error, search_seconds)
                self.report(error)
            finally:
                self.reports.linger()
            raise
        finally:
            self._leaving.set()
            if before is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)
            self._heartbeat.stop()
            if watcher.ident is not None:
                watcher.join(timeout=1.0)
            # Python calls may join a world again in this process; leaked descriptors would add up.
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()

    @property
    def _search_seconds(self) -> float:
        limits = patience.current
        return limits.failure_search_seconds if self.directory is None else limits.failure_search_in_files_seconds

    def _raise_as_rank_failed(self, error: BaseException, search_seconds: float) -> None:
        if isinstance(error, UserError) or not self.broken_by_peer(error):
            return
        # Looked for before this rank says that it goes: the launcher ends the others soon after it does.
        hang = self._hang(error)
        if hang is not None:
            self.reports.write_file(hang)
        self.reports.write_file(self._last_words("peer", error))
        failure = self.reports.first(search_seconds if hang is None else 0.0) or hang
        if failure is None and not is_broken(error):
            return  # a broken connection was handled on the way to another error: that one counts
        if failure is None:
            # The next survivor to lose a connection loses it to this rank, and must hear of the first death.
            failure = self.reports.write_store(self._vanished(error))
        if self.directory is None:
            self._pass_on("failed", failure)
        raise RankFailed(self._news(failure)) from error

    def _vanished(self, error: BaseException) -> Failure:
        """Return a failure that names the rank whose heartbeat stopped, after connections closed without a report."""
        text = f"its connections closed, perhaps it was killed; rank {self._rank} saw it: {error}"[:LONGEST_MESSAGE]
        if self._host:  # the store may be on a lost machine: nothing is asked of it
            limit = MISSED_BEATS * patience.current.beat_seconds
            time.sleep(limit)
            silent = silences(self._heartbeat.sightings, self._host, time.monotonic(), limit)
            for silence in sorted(silent, key=lambda silence: not silence.whole_host):
                failure = silence.failure()
                return failure if silence.whole_host else replace(failure, type="Death", message=text)
        else:
            for state in self._heartbeat.silent():
                if state.step is not None or state.phase:
                    return state.failure("Death", text)
        return Failure(-1, "silent", "", "Death", text, self._step, time.time())

    def _hang(self, error: BaseException) -> Failure | None:
        """Return a failure that names the rank that a collective timed out on; None if the error is no time-out."""
        missing = self._heartbeat.missing() if timed_out(error) else []
        if not missing:
            return None
        whereabouts = "; ".join(state.words() for state in missing)
        return missing[0].failure(HANG, f"it kept the others waiting until their time was over ({whereabouts})")

    def _news(self, failure: Failure) -> str:
        phase_note = f" in phase {self._phase!r}" if self._phase else ""
        own_name = f"Rank {self._rank} on {self._host}" if self._host else f"Rank {self._rank}"
        return f"{failure.sentence()}\n{own_name} therefore stops{phase_note}. {how_to_go_on(self._step)}"

    def _watch(self, exit_seconds: float) -> None:
        """Name machines that fall silent, and end this rank if it does not leave after another one failed."""
        while not self._leaving.wait(patience.current.failure_look_seconds):
            lost = self._silence.look() if self._silence is not None else None
            if lost is not None and self.reports.heard is None:
                self.reports.heard = failure = lost.failure()
                # In a thread, since a store on the lost machine lets a call block until its time-out.
                threading.Thread(target=self.reports.write_store, args=(failure,), daemon=True).start()
            failed = self.reports.heard
            if failed is not None:
                # Ranks that refuse a configuration all raise the same error as a rule, each in its own time.
                if not self._leaving.wait(exit_seconds * (3 if failed.kind == "user" else 1)):
                    self._end_process(failed)
                return

    def _end_process(self, failure: Failure) -> None:
        error = RankFailed(self._news(failure))
        self.reports.write_file(self._last_words("peer", error))
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
        if self.directory is None:
            self._pass_on_in_time("failed", failure)
        # The main thread may be blocked inside a collective, where no Python exception can reach it and sys.exit would
        # wait.
        os._exit(RankFailed.exit_code)


class _Phase:
    """Context manager that restores a channel's earlier phase, unless an exception leaves the block."""

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


def _in_save(phase: str) -> str:
    phase = phase.removesuffix(_GIVEN_UP)
    return f"in phase {phase!r} of its save" if phase else "in no save"
