"""Find and end every process of a launch: ranks, their children, and children that moved to another session.

Invariant: however the launcher ends, SIGKILL included, no process that it started outlives it.

A process belongs to a launch if its environment contains the launch directory, if it is in the process group or session
of a rank, or if it descends from a process that belongs. A program that a reward starts with an empty environment in a
new session is only a descendant; if its parent ends, the fork server of reward workers
(holdfast.processes.server) becomes its parent. For this reason all processes are stopped with SIGSTOP, until
no new descendant appears, before any is killed: if the server were killed first, its orphans would pass to init,
where nothing shows to which launch they belong. Orphans of a rank itself are not found, since ranks adopt none.

Run as a program, this file is the *guard*: a process in another session that waits until the launcher's end of a pipe
closes. A pipe closes however its owner dies, and unlike PR_SET_PDEATHSIG the guard also ends grandchildren. It imports
the standard library only, so that it starts in about 10 ms. If launcher and guard are killed together, the kernel kills
the ranks (`tied_to_this_thread`), and the children of ranks end as after any death of a rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_DONE = "done"
_GUARD_KILL_SECONDS = 30.0  # not of patience.py, which the guard does not import


def living(mark: str, leaders: Collection[int]) -> set[int]:
    """Return the processes of a launch that still run.

    Args:
        mark: `NAME=value`, an entry that the environment of every process of the launch contains.
        leaders: Process ids of the ranks, each of which leads a session and a process group.
    """
    mark_entry = mark.encode() + b"\0"
    processes: set[int] = set()
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208  names only: a Path per process costs more than the scan
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        parent, belongs = _look(entry, mark_entry, leaders)
        children.setdefault(parent, []).append(int(entry))
        if belongs:
            processes.add(int(entry))
    unseen = list(processes)
    while unseen:
        new = [child for child in children.get(unseen.pop(), ()) if child not in processes]
        processes.update(new)
        unseen += new
    return processes


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process is known to have a handler for a signal; without one the signal might kill it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return any(mask >> (number - 1) & 1 for mask in masks)


def _look(pid: str, mark_entry: bytes, leaders: Collection[int]) -> tuple[int, bool]:
    """Return the parent of a process, and whether the process itself belongs to the launch; (0, False) if it ended."""
    parent = 0
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:  # noqa: PTH123  see living
            # The second field is the program's name in parentheses, which may itself contain blanks and parentheses.
            state, ppid, group, session = stat.read().rpartition(b")")[2].split()[:4]
        if state in (b"Z", b"X"):
            return 0, False
        parent = int(ppid)
        if int(group) in leaders or int(session) in leaders:
            return parent, True
        with open(f"/proc/{pid}/environ", "rb") as environ:  # noqa: PTH123
            # /proc/PID/environ is what exec was given: a process that changes its own variables later still shows the
            # mark.
            return parent, (b"\0" + mark_entry) in (b"\0" + environ.read())
    except (OSError, ValueError):  # it ended while we looked, or hides its environment
        return parent, False


def _send(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end(
    mark: str,
    leaders: Collection[int],
    term_seconds: float,
    kill_seconds: float,
    reap: Callable[[], object] = lambda: None,
) -> set[int]:
    """Send SIGTERM to every process of the launch, then SIGKILL to those left; return those that survived both.

    Args:
        mark: See `living`.
        leaders: See `living`.
        term_seconds: Time between SIGTERM and SIGKILL; 0 sends SIGKILL at once.
        kill_seconds: Time to wait for killed processes to go (one inside a hung driver call cannot).
        reap: Called between looks, to collect children that ended.
    """
    if term_seconds > 0:
        deadline = time.monotonic() + term_seconds
        _send(living(mark, leaders), signal.SIGTERM)
        reap()
        while living(mark, leaders) and time.monotonic() < deadline:
            time.sleep(0.1)
            reap()
    deadline = time.monotonic() + kill_seconds
    stopped: set[int] = set()
    while new := living(mark, leaders) - stopped:  # none of these starts or loses a child any more
        _send(new, signal.SIGSTOP)
        stopped |= new
    while True:
        remaining = living(mark, leaders)  # again each time: one may have been started while it was not yet stopped
        _send(remaining, signal.SIGKILL)
        reap()
        if not remaining or time.monotonic() > deadline:
            return remaining
        time.sleep(0.05)


def tied_to_this_thread() -> Callable[[], None]:
    """Return a `preexec_fn` that lets the kernel kill the child when this thread ends.

    The function looks nothing up and allocates little: between fork and exec, locks that another thread held at the
    fork stay locked for ever.
    """
    import ctypes  # not at the top: the guard starts without

    prctl, launcher = ctypes.CDLL(None).prctl, os.getpid()
    arguments = [ctypes.c_ulong(value) for value in (signal.SIGKILL, 0, 0, 0)]

    def tie() -> None:
        # The signal comes when the parent *thread* ends, not the process; and it is not inherited by grandchildren.
        prctl(_PR_SET_PDEATHSIG, *arguments)
        if os.getppid() != launcher:  # it died before
            os._exit(1)

    return tie


class Guard:
    """The process that ends a launch whose launcher was killed; a context manager."""

    def __init__(self, mark: str, environ: Mapping[str, str]) -> None:
        name = mark.partition("=")[0]
        self._process = subprocess.Popen(
            # Isolated, without site-packages: a user's PYTHONPATH or .pth file must neither slow the guard down nor
            # break it.
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={key: value for key, value in environ.items() if key != name},
            # A scheduler or terminal that kills the launcher's session or group must not take the guard with it.
            start_new_session=True,
            text=True,
        )
        self._tell(mark)

    def watch(self, leader: int) -> None:
        """Add a rank to those that must not outlive this process."""
        self._tell(str(leader))

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a guard that somebody killed is no reason to stop a run
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *raised: object) -> None:
        if raised[0] is None:
            self._tell(_DONE)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def _guard_main() -> None:
    mark = sys.stdin.readline().rstrip("\n")
    leaders: set[int] = set()
    for line in sys.stdin:
        if line.strip() == _DONE:
            return
        leaders.add(int(line))
    if mark:
        end(mark, leaders, term_seconds=0.0, kill_seconds=_GUARD_KILL_SECONDS)


if __name__ == "__main__":
    _guard_main()
