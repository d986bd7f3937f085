"""Find the rank whose death caused the others, and describe it. Pure functions of exit codes, reports and logs."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import RunStopped
from holdfast.parallel.failure.reports import Failure

EXIT_WITHOUT_RESULT = 4
"""Exit code of a rank that finished without an error and without a result. It is not 1, with which any Python process
ends on an uncaught exception."""
_LAST_LINES = 6
_LONGEST_ERROR = 15
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_=>()])")
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


HANG = "Hang"
"""Type of a report about a rank that kept the others waiting, as `parallel.failure` writes it."""


def first_cause(deaths: Sequence[Death]) -> Death:
    """Return the death that caused the others.

    A rank that reported its own error, or was killed, precedes a rank that only lost another one; of equals the earlier
    counts. SIGABRT counts as losing another rank, since NCCL's watchdog aborts a process whose peer has gone.
    """

    def order(death: Death) -> tuple[bool, float]:
        report = death.report
        if report is not None and (report.kind in ("error", "user") or report.type == HANG):
            return False, report.time
        lost_another = (
            death.ended_by_launcher
            or death.exit_code in (0, RunStopped.exit_code, -signal.SIGABRT)
            or (report is not None and report.kind == "peer")
        )
        return lost_another, death.time

    return min(deaths, key=order)


def how_it_ended(exit_code: int) -> str:
    """Return 'was killed by SIGKILL' or 'ended with exit code 7'."""
    if exit_code < 0:
        return f"was killed by {_signal_name(-exit_code)}"
    return f"ended with exit code {exit_code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _sentence(death: Death, step: int | None) -> str:
    report = death.report
    context = f" in phase {death.phase!r}" if death.phase else ""
    context += f" at step {step}" if step is not None else ""
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


def as_shown(text: str) -> str:
    """Return a text as it would read on a terminal: no colours, and of each overwritten line the last state."""
    lines = _ESCAPES.sub("", text).split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2].rstrip() for line in lines)


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
