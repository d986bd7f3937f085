"""One attempt of a launch: start the ranks, watch them, end the others when one dies, and tell how it ended.

Invariant: when `attempt` returns, none of its processes runs any more; after a death it returns within 10 seconds.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGUSR1

from holdfast.errors import UserError
from holdfast.files import read_end
from holdfast.launch.deaths import Death, describe_death, how_it_ended, last_paragraph
from holdfast.launch.directory import LaunchDirectory
from holdfast.launch.environment import LAUNCH_DIRECTORY_VARIABLE, rank_environment
from holdfast.launch.processes import Guard, catches, end, tied_to_this_thread
from holdfast.launch.rendezvous import meeting_file
from holdfast.launch.stops import StopSignals
from holdfast.launch.terminal import Relay
from holdfast.launch.verdict import IN_ORDER, Verdict, judge
from holdfast.parallel.failure.reports import Failure
from holdfast.patience import Patience
from holdfast.text.escaping import escaped_paragraph

_READ_OF_LOG = 1 << 16


@dataclass(frozen=True)
class Ending:
    """How an attempt ended, the text for the user, and the step that it had reached."""

    verdict: Verdict
    text: str
    step: int | None


@dataclass(frozen=True)
class Start:
    """What an attempt starts: the command of a rank, the number of ranks, their environment and their time-outs."""

    command: Sequence[str]
    ranks: int
    threads: int
    environ: Mapping[str, str]
    patience: Patience


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    log_start: int
    seen_dead_at: float | None = None
    ended_by_launcher: bool = False

    def poll(self) -> int | None:
        code = self.process.poll()
        if code is not None and self.seen_dead_at is None:
            self.seen_dead_at = time.time()
        return code


def tell(text: str) -> None:
    """Write a paragraph to the user's terminal."""
    with contextlib.suppress(OSError):  # the terminal has gone: the exit code still speaks
        sys.stderr.write(escaped_paragraph(text.rstrip("\n")) + "\n")
        sys.stderr.flush()


def attempt(number: int, start: Start, directory: LaunchDirectory, guard: Guard, stops: StopSignals) -> Ending:
    """Run all ranks once, from their start to the end of the last process."""
    directory.begin_attempt()
    starts = [directory.begin_log(rank, start.ranks, number) for rank in range(start.ranks)]
    relay = Relay(directory.log(0))
    ranks: list[_Rank] = []
    with meeting_file(directory.path) as store:
        try:
            for rank in range(start.ranks):
                ranks.append(_Rank(rank, _start_rank(rank, store, start, directory, relay), starts[rank]))
                guard.watch(ranks[-1].process.pid)
        finally:
            relay.start()
            if len(ranks) == start.ranks:
                _watch(ranks, directory, stops, start.patience)
            survivors = _end(ranks, directory, start.patience)
            relay.finish(1.0)
            directory.settle()
    if survivors:
        tell(f"These processes did not end even on SIGKILL: {', '.join(map(str, sorted(survivors)))}.")
    return _judge(ranks, directory, stops, relay.wrote)


def _start_rank(
    rank: int, store: Path, start: Start, directory: LaunchDirectory, relay: Relay
) -> subprocess.Popen[bytes]:
    environ = rank_environment(start.environ, rank, start.ranks, store, start.threads, directory.path)
    if rank == 0:
        environ |= relay.environ
    with directory.log(rank).open("ab") as log:
        return subprocess.Popen(
            list(start.command),
            stdin=subprocess.DEVNULL,
            stdout=relay.stdout if rank == 0 else log,
            stderr=relay.stderr if rank == 0 else log,
            env=environ,
            # A session of its own: Ctrl-C at the terminal reaches the launcher alone, which passes on what it decides.
            start_new_session=True,
            preexec_fn=tied_to_this_thread(),  # noqa: PLW1509 - it takes no lock
        )


def _watch(ranks: Sequence[_Rank], directory: LaunchDirectory, stops: StopSignals, patience: Patience) -> None:
    """Return when all ranks have ended, or when the caller must end those that still run."""
    deadline: float | None = None
    next_look = 0.0
    while None in [rank.poll() for rank in ranks]:  # a list: each one's time of death is taken in each round
        _pass_on(ranks, stops)
        if stops.now:
            tell("Stopping now.")
            return
        seconds = time.monotonic()
        if seconds >= next_look:
            next_look = seconds + patience.launcher_look_seconds
            directory.settle()
            # Also once there is trouble: a survivor may say that it lost a rank before that rank is seen dead, and
            # then waits for the word that is left here for the dead one.
            if _trouble(ranks, directory) and deadline is None:
                deadline = seconds + patience.settle_seconds
        if deadline is not None and seconds > deadline:
            return
        time.sleep(patience.launcher_poll_seconds)


def _pass_on(ranks: Sequence[_Rank], stops: StopSignals) -> None:
    for request, text in stops.to_pass_on():
        tell(text)
        for rank in ranks:
            if rank.poll() is None:
                rank.process.send_signal(request)
    # One rank is enough, since all agree; two that heard of it between two steps would save twice.
    if stops.save and ranks[0].poll() is None and catches(ranks[0].process.pid, SIGUSR1):
        stops.save = False
        ranks[0].process.send_signal(SIGUSR1)
        tell("SIGUSR1: the ranks save after their step and go on.")


def _trouble(ranks: Sequence[_Rank], directory: LaunchDirectory) -> bool:
    """Return whether a rank has died or reported a failure, and write the reports of ranks that died without one.

    After a rank that ended in order, the others are waited for.
    """
    reports = {report.rank for report in directory.reports()}
    dead = False
    for rank in ranks:
        code = rank.poll()
        if code is None or code in IN_ORDER:
            continue
        dead = True
        if rank.number not in reports and code != UserError.exit_code:
            assert rank.seen_dead_at is not None
            sentence = f"it {how_it_ended(code)}"
            phase = directory.phase(rank.number)
            directory.report(
                Failure(rank.number, "silent", phase, "Death", sentence, directory.step(), rank.seen_dead_at)
            )
    return dead or bool(reports)


def _end(ranks: Sequence[_Rank], directory: LaunchDirectory, patience: Patience) -> set[int]:
    for rank in ranks:
        rank.ended_by_launcher = rank.poll() is None

    def reap() -> None:
        for rank in ranks:
            rank.poll()

    mark = f"{LAUNCH_DIRECTORY_VARIABLE}={directory.path}"
    leaders = {rank.process.pid for rank in ranks}
    return end(mark, leaders, patience.term_seconds, patience.kill_seconds, reap)


def _judge(ranks: Sequence[_Rank], directory: LaunchDirectory, stops: StopSignals, wrote: bool) -> Ending:
    step = directory.step()
    reports = {report.rank: report for report in directory.reports()}
    deaths = [_death(rank, directory, reports.get(rank.number)) for rank in ranks]
    verdict, _, told = judge(deaths, list(reports.values()), stop_requested=stops.any, stop_now=stops.now)
    if told is None:
        return Ending(verdict, "", step)
    if verdict is Verdict.REFUSED:
        return Ending(verdict, _refusal(told, deaths[0], wrote), step)
    return Ending(verdict, describe_death(told, step, _short(directory.log(told.rank)), told.rank == 0 and wrote), step)


def _refusal(refused: Death, first: Death, rank_0_wrote: bool) -> str:
    if refused.rank == 0 and rank_0_wrote:
        return ""
    report = refused.report
    text = report.message if report is not None and report.kind == "user" else last_paragraph(refused.log)
    # Rank 0 may have told it and be ended by the launcher while it was still leaving.
    return "" if rank_0_wrote and text.strip() and text.strip() in first.log else text


def _death(rank: _Rank, directory: LaunchDirectory, report: Failure | None) -> Death:
    with contextlib.suppress(subprocess.TimeoutExpired):  # inside a hung driver call it outlives SIGKILL
        rank.process.wait(timeout=0.1)
    code = rank.poll()
    return Death(
        rank=rank.number,
        exit_code=-9 if code is None else code,
        time=rank.seen_dead_at or time.time(),
        phase=report.phase if report is not None else directory.phase(rank.number),
        report=report,
        log=read_end(directory.log(rank.number), _READ_OF_LOG, rank.log_start),
        ended_by_launcher=rank.ended_by_launcher,
    )


def _short(path: os.PathLike[str]) -> str:
    relative = os.path.relpath(path)
    return os.fspath(path) if relative.startswith("..") else relative
