"""The findings that the checks of `holdfast doctor` return."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.files import NotRegular
from holdfast.text.escaping import error_words, escaped_paragraph


class Grade(StrEnum):
    """The grade of a finding.

    `fail` means that the run would stop, or would not be the run that was asked for. `unknown` means that a check did
    not run.
    """

    ok = "Ok"
    unknown = "Unknown"
    warn = "Warn"
    fail = "Fail"


@dataclass(frozen=True)
class Finding:
    """The result of one check: a grade, a sentence, and advice on how to fix a problem."""

    grade: Grade
    name: str
    text: str
    fix: str = ""

    def line(self) -> str:
        """Return the finding as the line that is printed."""
        stop = "" if self.text.endswith((".", "!", "?")) else "."
        fix = f"{stop} {self.fix}" if self.fix else ""
        return f"{self.grade.value:<7}  {self.name}: {escaped_paragraph(self.text)}{fix}"

    def as_plain(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return asdict(self)


RANKS = "ranks"
"""The check that all ranks make together."""
Look = Callable[[], Iterator[Finding]]


@dataclass(frozen=True)
class Check:
    """A named check and the function that runs it."""

    name: str
    look: Look


def ok(name: str, text: str) -> Finding:
    """Return a finding that what was checked is as it should be."""
    return Finding(Grade.ok, name, text)


def unknown(name: str, text: str, fix: str = "") -> Finding:
    """Return a finding for a check that did not or could not run; it does not refuse a run."""
    return Finding(Grade.unknown, name, text, fix)


def warn(name: str, text: str, fix: str = "") -> Finding:
    """Return a finding that the run starts, and that something about it may not be intended."""
    return Finding(Grade.warn, name, text, fix)


def fail(name: str, text: str, fix: str = "") -> Finding:
    """Return a finding that the run would be refused or would fail."""
    return Finding(Grade.fail, name, text, fix)


def findings_of(checks: Sequence[Check]) -> Iterator[Finding]:
    """Run the checks in order; an error that would refuse a run fails, and a check that cannot run is unknown."""
    refused: dict[str, str] = {}
    for check in checks:
        try:
            yield from check.look()
        except (HoldfastError, NotRegular) as error:
            message = str(error)
            earlier = next((name for refusal, name in refused.items() if message.startswith(refusal)), None)
            refused.setdefault(message, check.name)
            if earlier is None:
                yield fail(check.name, message)
            else:
                yield unknown(check.name, f"not looked at, for what {earlier} says")
        except Exception as error:  # noqa: BLE001 - a fault of the check says nothing of the run
            yield unknown(check.name, f"could not be looked at: {error_words(error)}")


def since(start: float) -> str:
    """Return the seconds since a reading of `time.perf_counter` as text."""
    return f"{time.perf_counter() - start:.1f} s"
