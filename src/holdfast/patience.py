"""Time-outs and polling intervals that several files share or that tests shorten, in one record.

Read `patience.current` where a wait begins, never at import: tests replace it with shorter times before they fork the
processes that they start. Two programs have constants of their own, because they import next to nothing in order to
start in milliseconds: `features/code/run_tests.py` and the guard of `launch/processes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """Times in seconds. A field named `look` is a polling interval."""

    file_retries_seconds: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Pauses before the retries of a file operation that failed with a passing error."""
    http_first_pause_seconds: float = 0.25
    """Before a request is tried again; doubled each time."""
    http_longest_pause_seconds: float = 4.0

    server_start_seconds: float = 900.0
    """For a server that we start to load its model and answer."""
    server_restart_seconds: float = 180.0
    """For ranks to see a server again that died, where we start servers."""
    server_leave_seconds: float = 15.0
    """For a server of a launcher that was killed to leave its port."""
    server_look_seconds: float = 0.5
    """Polling interval for a server's start, its port and its process."""

    rows_index_seconds: float = 60.0
    """For another process to index the rows of small files, before this one indexes them for itself."""

    pool_close_seconds: float = 5.0
    """For reward workers to leave, before they are killed and again after it."""
    supervisor_tick_seconds: float = 0.2
    """Between two looks of a fork server at workers that are at work."""
    supervisor_idle_tick_seconds: float = 1.0
    sign_of_life_seconds: float = 1.0
    """Between two messages by which a fork server tells its rank that it is alive."""
    supervisor_kill_seconds: float = 2.0
    """Longest wait for processes that were killed."""

    beat_seconds: float = 1.0
    """Between two heartbeats of a rank; three missed ones are silence."""
    silent_host_seconds: float = 10.0
    """Without a beat of a rank on another machine, after which it is named."""
    lost_host_seconds: float = 60.0
    """Without a beat of any rank of another machine, after which it is given up and the run ends or goes on without."""
    failure_look_seconds: float = 0.5
    """Between two looks for the failure of another rank."""
    failure_store_seconds: float = 0.5
    """After which the store is asked too, where ranks leave files: when its host died it prints a page of C++."""
    failure_search_seconds: float = 2.0
    """Longest wait for the cause of a collective that broke."""
    failure_search_in_files_seconds: float = 5.0
    """Like `failure_search_seconds`, but under our launcher, which writes a report file for a rank that died. It is
    shorter than the time that the launcher leaves survivors (`settle_seconds` plus `term_seconds`), so that they can
    still report what they know."""
    failure_exit_seconds: float = 5.0
    """For a rank to leave a collective by itself after another one failed."""
    failure_linger_seconds: float = 1.5
    """Longest stay of a failed rank until all have heard of it."""

    lease_stale_seconds: float = 120.0
    """A lease of another host that was not renewed for this long is dead. All machines of a place must agree."""
    lease_renew_seconds: float = 15.0
    lease_look_seconds: float = 2.0
    """Between two looks at a lease whose holder nobody here can see."""
    lease_withdraw_seconds: float = 1.0
    """For jobs that try at once to see each other's lease in an object store."""

    session_look_seconds: float = 0.005
    """Between two looks at a save that must end."""
    save_look_seconds: float = 0.01
    """Between two collective looks at a save that ranks wait for together."""
    raising_seconds: float = 5.0
    """Longest wait of a rank that raises for the others to raise too, so that the last whole step can be saved."""

    tracker_silent_seconds: float = 60.0
    """After which a tracker that has recorded none of the rows that wait for it is named."""
    tracker_look_seconds: float = 1.0
    """Between two looks of a run at its trackers."""
    tracker_close_seconds: float = 4.0
    """For a tracker to record the rest when a run ends; a second of the five that this may take is left to kill it."""

    exit_word_seconds: float = 5.0
    """Before a rank that has done everything names the threads that keep its process."""
    threads_end_seconds: float = 300.0
    """Longest wait of a rank that has done everything for such threads, which are a user's own."""

    launcher_poll_seconds: float = 0.05
    """Between two looks of the launcher at its processes."""
    launcher_look_seconds: float = 0.25
    """Between two looks of the launcher at what ranks wrote."""
    settle_seconds: float = 3.0
    """After a death the others may end by themselves, with a message of their own. The sum of this and the next two
    stays below 10 seconds."""
    term_seconds: float = 3.0
    """From SIGTERM to SIGKILL."""
    kill_seconds: float = 2.0
    """For killed processes to go."""
    first_rank_seconds: float = 5.0
    """For torchrun to end a rank that keeps quiet, once the first has told a mistake and ended."""
    page_after_stop_seconds: float = 5.0
    """Like `page_seconds`, for a run that a signal stopped: a scheduler may be about to kill it."""
    demo_look_seconds: float = 0.05
    """Between two looks of the demo at the steps of the run in which it kills a rank."""


current = Patience()
