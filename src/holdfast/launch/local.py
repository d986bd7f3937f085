"""Start the ranks of a run on this machine, and start them again when one dies.

The exit code is the command's: 0 done, 1 nothing to show, 2 refused, 3 stopped and can be started again
(holdfast.errors). This process never imports torch. Restarting is safe because a run resumes by itself from its newest
verified checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import holdfast.patience
from holdfast.config.sections.launch import LaunchConfig
from holdfast.errors import how_to_go_on
from holdfast.launch.directory import LaunchDirectory
from holdfast.launch.environment import LAUNCH_DIRECTORY_VARIABLE, resolve_ranks, under_torchrun
from holdfast.launch.processes import Guard
from holdfast.launch.stops import StopSignals
from holdfast.launch.verdict import Verdict
from holdfast.launch.watch import Ending, Start, attempt, tell
from holdfast.patience import Patience

__all__ = ["Patience", "launch_local", "resolve_ranks", "under_torchrun"]


def launch_local(
    command: Sequence[str],
    ranks: int,
    launch: LaunchConfig,
    run_directory: Path,
    environ: Mapping[str, str] | None = None,
    patience: Patience | None = None,
) -> int:
    """Run `command` once per rank and return the exit code of the whole.

    Args:
        command: The argv of one rank, the same for all; each learns its rank from the environment, as under torchrun.
        ranks: Number of processes to start; see `resolve_ranks`.
        launch: The section `launch`, for restarts and threads.
        run_directory: Directory of the run, which rank 0 creates; it exists once it contains `run.json`.
        environ: The environment that ranks inherit; this process's own if None.
        patience: Times between a death and the end of the other ranks.

    Call it in the main thread: only there can Ctrl-C and SIGTERM be handled, and the kernel kills the ranks when the
    thread that started them ends.

    Raises:
        ConfigError: The parent of the run directory cannot be written.
    """
    environ = os.environ if environ is None else environ
    start = Start(command, ranks, launch.threads_per_rank, environ, patience or holdfast.patience.current)
    with LaunchDirectory(run_directory) as directory:
        mark = f"{LAUNCH_DIRECTORY_VARIABLE}={directory.path}"
        with Guard(mark, environ) as guard, StopSignals() as stops:
            ending = _attempts(start, launch.max_restarts, directory, guard, stops)
            _note(ending, directory, stops)
        directory.keep_logs = ending.verdict is Verdict.DIED
    return ending.verdict.exit_code


def _note(ending: Ending, directory: LaunchDirectory, stops: StopSignals) -> None:
    """Record in events.jsonl how an attempt that had begun to train ended, unless its ranks have recorded it."""
    if ending.step is None:
        return
    if ending.verdict is Verdict.STOPPED and stops.now:
        directory.note_ending("stop", ending.step, "stopped at once, without a save")
    elif ending.verdict in {Verdict.DIED, Verdict.REFUSED}:
        reported = [report for report in directory.reports() if report.kind in {"error", "user"}]
        text = ending.text or next((report.message for report in reported), "")
        directory.note_ending("failed", ending.step, text.strip().partition("\n")[0] or "see logs/rank-0.log")


def _attempts(start: Start, max_restarts: int, directory: LaunchDirectory, guard: Guard, stops: StopSignals) -> Ending:
    died_at: set[int | None] = set()
    restarts = 0
    number = 1
    while True:
        ending = attempt(number, start, directory, guard, stops)
        if ending.text:
            tell(ending.text)
        number += 1
        if ending.verdict is not Verdict.DIED:
            return ending
        moment = "before its first step" if ending.step is None else f"at step {ending.step}"
        if ending.step in died_at:
            tell(f"The run died {moment} twice, so it is not started again: the cause is not chance.")
            return ending
        if stops.any or restarts == max_restarts:
            tell(how_to_go_on(ending.step))
            return ending
        died_at.add(ending.step)
        restarts += 1
        _note(ending, directory, stops)
        tell(f"Restart {restarts} of at most {max_restarts}, from the newest verified checkpoint if there is one.")
