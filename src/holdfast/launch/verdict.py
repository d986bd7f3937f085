"""The verdict on one attempt of a launch: a table, whose first row that applies decides. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from signal import SIGINT, SIGTERM
from typing import NamedTuple

from holdfast.errors import HoldfastError, RunStopped, UserError
from holdfast.launch.deaths import EXIT_WITHOUT_RESULT, Death, first_cause
from holdfast.parallel.failure.reports import Failure

IN_ORDER = {0, RunStopped.exit_code, EXIT_WITHOUT_RESULT}
"""Exit codes of ranks after which the launcher waits for the others."""
_AS_REQUESTED = {0, RunStopped.exit_code, -SIGINT, 128 + SIGINT, -SIGTERM, 128 + SIGTERM}


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
        (stop_now and codes == {0}, Verdict.DONE, "a second signal, and every rank ended with 0"),
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
