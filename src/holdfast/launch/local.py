"""Start the ranks of a run on this machine, watch them, end the others when one dies, and start them again.

The exit code is the command's: 0 done, 1 nothing to show, 2 refused, 3 stopped and can be started again
(holdfast.errors). This process never imports torch. Restarting is safe because a run resumes by itself from its newest
verified checkpoint. Invariant: after an attempt none of its processes runs any more; after a death it ends within 10
seconds.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGUSR1

import holdfast.patience
from holdfast.config.sections.launch import LaunchConfig
from holdfast.errors import UserError, how_to_go_on
from holdfast.files import read_end
from holdfast.launch.directory import LaunchDirectory, meeting_file
from holdfast.launch.environment import LAUNCH_DIRECTORY_VARIABLE, computes_on_cpu, rank_environment, visible_names
from holdfast.launch.processes import Guard, catches, end, tied_to_this_thread
from holdfast.launch.terminal import Relay, StopSignals, tell
from holdfast.launch.verdict import (
    IN_ORDER,
    Death,
    Verdict,
    describe_death,
    how_it_ended,
    judge,
    last_paragraph,
    lost_ranks,
)
from holdfast.parallel.failure.reports import Failure
from holdfast.patience import Patience

_READ_OF_LOG = 1 << 16


def launch_local(  # noqa: PLR0913, PLR0917 - what a launch is, and how it is tested
    command: Sequence[str],
    ranks: int,
    launch: LaunchConfig,
    run_directory: Path,
    environ: Mapping[str, str] | None = None,
    patience: Patience | None = None,
    fewer: Sequence[int] = (),
) -> int:
    """Run `command` once per rank and return the exit code of the whole.

    Args:
        command: The argv of one rank, the same for all; each learns its rank from the environment, as under torchrun.
        ranks: Number of processes to start; see `resolve_ranks`.
        launch: The section `launch`, for restarts and threads.
        run_directory: Directory of the run, which rank 0 creates; it exists once it contains `run.json`.
        environ: The environment that ranks inherit; this process's own if None.
        patience: Times between a death and the end of the other ranks.
        fewer: Numbers of ranks with which the run goes on when some are lost; see `launch.fewer`.

    Call it in the main thread: only there can Ctrl-C and SIGTERM be handled, and the kernel kills the ranks when the
    thread that started them ends.

    Raises:
        ConfigError: The parent of the run directory cannot be written.
    """
    environ = os.environ if environ is None else environ
    threads = launch.named_threads
    if threads is None and "OMP_NUM_THREADS" not in environ and not computes_on_cpu(launch, environ):
        threads = 1  # on GPUs nobody times them
    on_gpus = not computes_on_cpu(launch, environ)
    limits = patience or holdfast.patience.current
    start = _Start(command, ranks, on_gpus, threads, environ, limits, tuple(range(ranks)))
    with LaunchDirectory(run_directory) as directory:
        mark = f"{LAUNCH_DIRECTORY_VARIABLE}={directory.path}"
        with Guard(mark, environ) as guard, StopSignals() as stops:
            ending = _attempts(start, launch.max_restarts, fewer, directory, guard, stops)
            _note(ending, directory, stops)
        directory.keep_logs = ending.verdict is Verdict.DIED
    return ending.verdict.exit_code


@dataclass(frozen=True)
class _Start:
    """What an attempt starts: the command of a rank, the number of ranks, their environment and their time-outs."""

    command: Sequence[str]
    ranks: int
    on_gpus: bool
    threads: int | None
    environ: Mapping[str, str]
    patience: Patience
    healthy: tuple[int, ...]
    """GPUs of the machine's that no lost rank had; ranks take the first ones."""
    shown: Mapping[str, str] = field(default_factory=dict)
    """Variable that shows ranks these GPUs alone, once a rank was lost."""

    def without(self, lost: frozenset[int], fewer: Sequence[int]) -> _Start | None:
        """Return a start of fewer ranks, without the GPUs of the lost ones; None where too few are left."""
        left = tuple(gpu for rank, gpu in enumerate(self.healthy) if rank not in lost)
        number = max((number for number in fewer if number <= len(left)), default=0)
        if not number or not lost:
            return None
        shown = {"CUDA_VISIBLE_DEVICES": visible_names(list(left[:number]), self.environ)} if self.on_gpus else {}
        return replace(self, ranks=number, healthy=left, shown=shown)


@dataclass(frozen=True)
class _Ending:
    """How an attempt ended, the text for the user, and the step that it had reached."""

    verdict: Verdict
    text: str
    step: int | None
    lost: frozenset[int] = frozenset()
    """Ranks that died for a cause of their own."""


def _attempts(
    whole: _Start,
    max_restarts: int,
    fewer: Sequence[int],
    directory: LaunchDirectory,
    guard: Guard,
    stops: StopSignals,
) -> _Ending:
    died_at: list[int | None] = []
    start, restarts = whole, 0
    while True:
        ending = _Attempt(start, directory, stops).run(len(died_at) + 1, guard)
        if ending.text:
            tell(ending.text)
        if ending.verdict is not Verdict.DIED:
            return ending
        if ending.step in died_at:
            moment = "before its first step" if ending.step is None else f"at step {ending.step}"
            tell(f"The run died {moment} twice, so it is not started again: the cause is not chance.")
            return ending
        left = start.without(ending.lost, fewer)
        if stops.any or (left is None and restarts == max_restarts):
            tell(how_to_go_on(ending.step))
            return ending
        died_at.append(ending.step)
        _note(ending, directory, stops)
        restarts += left is None
        words = f"Restart {restarts} of at most {max_restarts}"
        if left is not None:
            words = f"The run goes on with {left.ranks} of {whole.ranks} ranks"
        tell(f"{words}, from the newest verified checkpoint if there is one.")
        start = left or whole


def _note(ending: _Ending, directory: LaunchDirectory, stops: StopSignals) -> None:
    """Record in events.jsonl how an attempt that had begun to train ended, unless its ranks have recorded it."""
    if ending.step is None:
        return
    if ending.verdict is Verdict.STOPPED and stops.now and not directory.has_stopped():
        directory.note_ending("stop", ending.step, "stopped at once, without a save")
    elif ending.verdict in {Verdict.DIED, Verdict.REFUSED}:
        reported = [report for report in directory.reports() if report.kind in {"error", "user"}]
        text = ending.text or next((report.message for report in reported), "")
        directory.note_ending("failed", ending.step, text.strip().partition("\n")[0] or "see logs/rank-0.log")


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


class _Attempt:
    """All ranks once, from their start to the end of the last process."""

    def __init__(self, start: _Start, directory: LaunchDirectory, stops: StopSignals) -> None:
        self._start, self._patience = start, start.patience
        self._directory, self._stops = directory, stops
        self._ranks: list[_Rank] = []

    def run(self, number: int, guard: Guard) -> _Ending:
        """Start the ranks, wait for them, end what is left, and judge."""
        self._directory.begin_attempt()
        ranks = range(self._start.ranks)
        log_starts = [self._directory.begin_log(rank, len(ranks), number) for rank in ranks]
        relay = Relay(self._directory.log(0))
        with meeting_file() as store:
            try:
                for rank in ranks:
                    self._ranks.append(_Rank(rank, self._started(rank, store, relay), log_starts[rank]))
                    guard.watch(self._ranks[-1].process.pid)
            finally:
                relay.start()
                if len(self._ranks) == len(ranks):
                    self._watch()
                survivors = self._end()
                relay.finish(1.0)
                self._directory.settle()
        if survivors:
            tell(f"These processes did not end even on SIGKILL: {', '.join(map(str, sorted(survivors)))}.")
        return self._judge(relay.wrote)

    def _started(self, rank: int, store: Path, relay: Relay) -> subprocess.Popen[bytes]:
        start, directory = self._start, self._directory
        environ = rank_environment(
            {**start.environ, **start.shown}, rank, start.ranks, store, start.threads, directory.path
        )
        if rank == 0:
            environ |= relay.environ
        with directory.log(rank).open("ab") as log:
            return subprocess.Popen(
                list(start.command),
                stdin=subprocess.DEVNULL,
                stdout=relay.stdout if rank == 0 else log,
                stderr=relay.stderr if rank == 0 else log,
                env=environ,
                # A session of its own: Ctrl-C at the terminal reaches the launcher alone, which passes on what it
                # decides.
                start_new_session=True,
                preexec_fn=tied_to_this_thread(),  # noqa: PLW1509 - it takes no lock
            )

    def _watch(self) -> None:
        """Return when all ranks have ended, or when the caller must end those that still run."""
        deadline: float | None = None
        next_look = 0.0
        while None in [rank.poll() for rank in self._ranks]:  # a list: each time of death is taken in each round
            self._pass_on()
            if self._stops.now:
                tell("Stopping now.")
                return
            seconds = time.monotonic()
            if seconds >= next_look:
                next_look = seconds + self._patience.launcher_look_seconds
                self._directory.settle()
                # Also once there is trouble: a survivor may say that it lost a rank before that rank is seen dead, and
                # then waits for the word that is left here for the dead one.
                if self._trouble() and deadline is None:
                    deadline = seconds + self._patience.settle_seconds
            if deadline is not None and seconds > deadline:
                return
            time.sleep(self._patience.launcher_poll_seconds)

    def _pass_on(self) -> None:
        for request, text in self._stops.to_pass_on():
            tell(text)
            for rank in self._ranks:
                if rank.poll() is None:
                    rank.process.send_signal(request)
        # One rank is enough, since all agree; two that heard of it between two steps would save twice.
        first = self._ranks[0]
        if self._stops.save and first.poll() is None and catches(first.process.pid, SIGUSR1):
            self._stops.save = False
            first.process.send_signal(SIGUSR1)
            tell("SIGUSR1: the ranks save after their step and go on.")

    def _trouble(self) -> bool:
        """Return whether a rank has died or reported a failure, and write the reports of ranks that died without one.

        After a rank that ended in order, the others are waited for.
        """
        directory = self._directory
        reports = {report.rank for report in directory.reports()}
        dead = [rank for rank in self._ranks if rank.poll() not in {None, *IN_ORDER}]
        for rank in dead:
            code = rank.process.returncode
            if rank.number not in reports and code != UserError.exit_code:
                assert rank.seen_dead_at is not None
                origin = (f"it {how_it_ended(code)}", directory.step(), rank.seen_dead_at)
                directory.report(Failure(rank.number, "silent", directory.phase(rank.number), "Death", *origin))
        return bool(dead or reports)

    def _end(self) -> set[int]:
        for rank in self._ranks:
            rank.ended_by_launcher = rank.poll() is None
        mark = f"{LAUNCH_DIRECTORY_VARIABLE}={self._directory.path}"
        leaders = {rank.process.pid for rank in self._ranks}
        limits = self._patience
        return end(mark, leaders, limits.term_seconds, limits.kill_seconds, lambda: [*map(_Rank.poll, self._ranks)])

    def _judge(self, wrote: bool) -> _Ending:
        step = self._directory.step()
        reports = {report.rank: report for report in self._directory.reports()}
        deaths = [self._death(rank, reports.get(rank.number)) for rank in self._ranks]
        stops = self._stops
        verdict, _, told = judge(deaths, list(reports.values()), stop_requested=stops.any, stop_now=stops.now)
        if told is None:
            return _Ending(verdict, "", step)
        if verdict is Verdict.REFUSED:
            return _Ending(verdict, _refusal(told, deaths[0], wrote), step)
        path = self._directory.log(told.rank)
        relative = os.path.relpath(path)
        shown = os.fspath(path) if relative.startswith("..") else relative
        return _Ending(verdict, describe_death(told, step, shown, told.rank == 0 and wrote), step, lost_ranks(deaths))

    def _death(self, rank: _Rank, report: Failure | None) -> Death:
        with contextlib.suppress(subprocess.TimeoutExpired):  # inside a hung driver call it outlives SIGKILL
            rank.process.wait(timeout=0.1)
        code = rank.poll()
        return Death(
            rank=rank.number,
            exit_code=-9 if code is None else code,
            time=rank.seen_dead_at or time.time(),
            phase=report.phase if report is not None else self._directory.phase(rank.number),
            report=report,
            log=read_end(self._directory.log(rank.number), _READ_OF_LOG, rank.log_start),
            ended_by_launcher=rank.ended_by_launcher,
        )


def _refusal(refused: Death, first: Death, rank_0_wrote: bool) -> str:
    if refused.rank == 0 and rank_0_wrote:
        return ""
    report = refused.report
    text = report.message if report is not None and report.kind == "user" else last_paragraph(refused.log)
    # Rank 0 may have told it and be ended by the launcher while it was still leaving.
    return "" if rank_0_wrote and text.strip() and text.strip() in first.log else text
