"""The verdict on one attempt of a launch, and the words on the rank that caused it. Pure functions.

The verdict is a table, whose first row that applies decides. Its facts are exit codes, reports and signals.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from holdfast.errors import HoldfastError, RunStopped, UserError
from holdfast.launch.terminal import as_shown
from holdfast.parallel.failure.reports import HANG, Failure, place

EXIT_WITHOUT_RESULT = 4
"""Exit code of a rank that finished without an error and without a result. It is not 1, with which any Python process
ends on an uncaught exception."""
IN_ORDER = {0, RunStopped.exit_code, EXIT_WITHOUT_RESULT}
"""Exit codes of ranks after which the launcher waits for the others."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AS_REQUESTED = {0, RunStopped.exit_code, *(-number for number in _SIGNALS), *(128 + number for number in _SIGNALS)}
_LAST_LINES = 6
_LONGEST_ERROR = 15
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", flags=re.MULTILINE)
"""torch.distributed puts this before each line of a traceback."""
_TRACEBACK = "Traceback (most recent call last):"
_FATAL = ("Fatal Python error:", "terminate called after")
_NATIVE_LOG = re.compile(r"^\[?(rank\d+\]:)?\[?[IWEF]\d{4} ")


@dataclass(frozen=True)
class Death:
    """How one rank ended."""

    rank: int
    exit_code: int
    """Negative: the number of the signal that killed it."""
    time: float
    """Seconds since the epoch at which the launcher saw it."""
    phase: str
    report: Failure | None
    log: str
    """What the rank printed in this attempt."""
    ended_by_launcher: bool


class Verdict(Enum):
    """How an attempt went."""

    DONE = "done", 0
    STOPPED = "stopped", RunStopped.exit_code
    WITHOUT_RESULT = "without result", HoldfastError.exit_code
    REFUSED = "refused", UserError.exit_code
    DIED = "died", RunStopped.exit_code

    @property
    def exit_code(self) -> int:
        """Exit code of the launcher."""
        return self.value[1]


class Outcome(NamedTuple):
    """The verdict, the row that decided, and the rank of which the user is told if one was refused or died."""

    verdict: Verdict
    row: str
    told: Death | None


def judge(deaths: Sequence[Death], reports: Sequence[Failure], *, stop_requested: bool, stop_now: bool) -> Outcome:
    """Judge the ends of all ranks, and all reports; `stop_now` means that the same signal came twice."""
    codes = {death.exit_code for death in deaths}
    own_codes = {death.exit_code for death in deaths if not death.ended_by_launcher}
    disturbed = bool(reports) or any(death.ended_by_launcher for death in deaths)
    failed = any(report.kind == "error" for report in reports)
    # A rank that was slow to leave may have been killed: its report counts, not its exit code.
    refused = [
        death
        for death in deaths
        if (death.report is not None and death.report.kind == "user")
        or (death.exit_code == UserError.exit_code and not death.ended_by_launcher)
    ]
    by_request = stop_requested and not failed and own_codes <= _AS_REQUESTED
    table = (
        (bool(refused) and not failed, Verdict.REFUSED, "a rank was refused, and none failed"),
        (stop_now and not failed and codes == {0}, Verdict.DONE, "a second signal, and every rank ended with 0"),
        (stop_now, Verdict.STOPPED, "a second signal"),
        (by_request and codes == {0}, Verdict.DONE, "a first signal, and every rank ended with 0"),
        (by_request, Verdict.STOPPED, "a first signal, and no rank ended by itself for another reason"),
        (disturbed, Verdict.DIED, "a rank reports something, or was ended by the launcher"),
        (not codes <= IN_ORDER, Verdict.DIED, "a rank ended out of order, without a report"),
        (EXIT_WITHOUT_RESULT in codes, Verdict.WITHOUT_RESULT, "a rank has no result"),
        (RunStopped.exit_code in codes, Verdict.STOPPED, "a rank stopped early"),
        (codes == {0}, Verdict.DONE, "every rank ended with 0"),
    )
    verdict, row = next((verdict, row) for applies, verdict, row in table if applies)
    if verdict is Verdict.REFUSED:
        return Outcome(verdict, row, refused[0])
    return Outcome(verdict, row, first_cause(deaths) if verdict is Verdict.DIED else None)


def first_cause(deaths: Sequence[Death]) -> Death:
    """Return the death that caused the others.

    A rank that reported its own error, or was killed, precedes a rank that only lost another one; of equals the earlier
    counts. SIGABRT counts as losing another rank, since NCCL's watchdog aborts a process whose peer has gone.
    """

    def order(death: Death) -> tuple[bool, float]:
        report = death.report
        return lost_another(death), death.time if report is None or not _tells_its_own(report) else report.time

    return min(deaths, key=order)


def lost_another(death: Death) -> bool:
    """Return whether a rank ended because of another one's death; see `first_cause`."""
    report = death.report
    if report is not None and _tells_its_own(report):
        return False
    return (
        death.ended_by_launcher
        or death.exit_code in {*IN_ORDER, -signal.SIGABRT}
        or (report is not None and report.kind == "peer")
    )


def lost_ranks(deaths: Sequence[Death]) -> frozenset[int]:
    """Return the ranks that a run which died goes on without: they died for a cause of their own.

    A disk that is full or broken is no fault of the rank that writes to it, and the next one would meet it too.
    """
    causes = {death.rank: death for death in deaths if not lost_another(death)} or {
        (first := first_cause(deaths)).rank: first
    }
    return frozenset(rank for rank, death in causes.items() if death.report is None or not death.report.of_disk)


def _tells_its_own(report: Failure) -> bool:
    return report.kind in ("error", "user") or report.type == HANG


def how_it_ended(exit_code: int) -> str:
    """Return 'was killed by SIGKILL' or 'ended with exit code 7'."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    known = -exit_code in set(signal.Signals)
    return f"was killed by {signal.Signals(-exit_code).name if known else f'signal {-exit_code}'}"


def _sentence(death: Death, step: int | None) -> str:
    report, context = death.report, place(death.phase, step)
    sentence = f"Rank {death.rank} {how_it_ended(death.exit_code)}{context}"
    if death.ended_by_launcher and report is not None:
        sentence = f"Rank {death.rank} failed{context}"
    if report is not None and report.type == HANG:
        sentence = f"Rank {death.rank} hung{context}: {report.message}"
    elif report is not None and report.kind in ("error", "user", "peer"):
        sentence += f": {report.type}: {report.message}"
    return sentence if sentence.endswith((".", "!", "?")) else sentence + "."


def describe_death(death: Death, step: int | None, log_path: object, already_shown: bool) -> str:
    """Return the paragraph that names a rank, its signal or exit code, where it was, and its last error lines.

    Args:
        death: The first cause.
        step: Step that the run had reached; None before its first.
        log_path: Path of the rank's log, which the paragraph names.
        already_shown: Whether its output is on the terminal already, so that only the error's name is repeated.
    """
    sentence = _sentence(death, step)
    if death.exit_code == -signal.SIGKILL and not death.ended_by_launcher:
        sentence += " If you did not send it, the machine ran out of memory: `dmesg` or the scheduler's log says so."
    error = last_error(death.log)
    if already_shown or not error:
        return f"{sentence}\nLog: {log_path}"
    indented = "\n".join(f"    {line}" for line in error.splitlines())
    return f"{sentence}\nIts last lines in {log_path}:\n{indented}"


def last_error(log: str) -> str:
    """Return the last exception of a log and the line of code that raised it; without an exception, the last lines."""
    lines = _RANK_PREFIX.sub("", as_shown(log)).splitlines()
    starts = [index for index, line in enumerate(lines) if _TRACEBACK in line or line.startswith(_FATAL)]
    if not starts:
        return last_paragraph(log)
    if not lines[starts[-1]].startswith(_TRACEBACK):
        return _paragraph(lines[starts[-1] :])
    body = lines[starts[-1] + 1 :]
    # Frames are indented, the exception is not; its message may go on over several lines.
    exception = next((index for index, line in enumerate(body) if line and not line.startswith(" ")), len(body))
    frames = [index for index in range(exception) if body[index].lstrip().startswith("File ")]
    frame = body[frames[-1] : exception] if frames else []
    return "\n".join([*frame, *_paragraph(body[exception:]).splitlines()])


def _paragraph(lines: Sequence[str]) -> str:
    paragraph: list[str] = []
    for line in lines[:_LONGEST_ERROR]:
        if paragraph and (not line or _NATIVE_LOG.match(line)):
            break
        paragraph.append(line)
    return "\n".join(paragraph)


def last_paragraph(log: str) -> str:
    """Return the last lines of a log, back to the nearest empty line."""
    last_lines: list[str] = []
    for line in reversed(_RANK_PREFIX.sub("", as_shown(log)).rstrip().splitlines()):
        if not line or len(last_lines) == _LAST_LINES:
            break
        last_lines.append(line)
    return "\n".join(reversed(last_lines))
