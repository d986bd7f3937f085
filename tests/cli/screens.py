"""What a run says on the screen, read as values; no other file of these tests has the words."""

from __future__ import annotations

import re
from typing import NamedTuple


class Ended(NamedTuple):
    """The last line but one: `stopped by SIGTERM, after step 7. The run is in runs/run.`"""

    why: str
    step: int
    place: str


def ended(out: str) -> Ended:
    """Return why a run ended, after which step, and where it is."""
    found = re.search(r"^(.*?),? after step (\d+)\. The run is in ([\w./-]+?)[.;](?: |$)", out, re.MULTILINE)
    assert found is not None, out
    return Ended(found[1], int(found[2]), found[3])


def resumed_at(out: str) -> int | None:
    """Return the step from which a run goes on; None if it began anew."""
    found = re.search(r"^resuming from step (\d+)", out, re.MULTILINE)
    return found and int(found[1])


def saved_before_the_error(out: str) -> int | None:
    """Return the step whose checkpoint a failing run still wrote."""
    found = re.search(r"checkpoint of step (\d+) is on disk, saved before the error", out)
    return found and int(found[1])


def page_of(out: str) -> str | None:
    """Return the path of the run's page, which the last line names."""
    found = re.search(r"^what happened, on one page: (\S+)\Z", out.rstrip(), re.MULTILINE)
    return found and found[1]


def numbers(text: str) -> list[float]:
    """Return the numbers that a text names, without those that are parts of words or paths."""
    return [float(each.replace(",", "")) for each in re.findall(r"(?<![\w.=/-])\d[\d,]*(?:\.\d+)?(?![\w/])", text)]
