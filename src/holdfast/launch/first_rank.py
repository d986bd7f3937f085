"""Under torchrun every rank meets the same mistake of a user's: the first rank tells it, the others keep quiet."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from holdfast import patience
from holdfast.errors import UserError
from holdfast.launch.environment import LAUNCH_DIRECTORY_VARIABLE, srun_task, under_torchrun

EXIT_FILE_VARIABLE = "HOLDFAST_EXIT_FILE"
"""Set by `launch.agent` where torchrun may start ranks again."""

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def await_first_rank() -> bool:
    """Return whether this rank tells a mistake that it met before the ranks had joined.

    torchrun ends all ranks as soon as one has ended, so those that keep quiet wait until the first has spoken. One
    that is still there afterwards has met what the first did not, or runs on another machine, which has a screen or a
    log of its own: there its first rank speaks too.
    """
    if not under_torchrun() and (srun_task() or 0) > 0:
        _await_end()
        return True
    if not under_torchrun() or LAUNCH_DIRECTORY_VARIABLE in os.environ or os.environ["RANK"] == "0":
        return True
    _await_end()
    return os.environ.get("GROUP_RANK") == "0" or os.environ.get("LOCAL_RANK", "0") == "0"


def _await_end() -> None:
    """Wait for torchrun, or srun --kill-on-bad-exit, to end this rank when the first has spoken and ended."""
    # A rank that leaves with an error is deaf to SIGTERM until it has said why; this one has nothing to say.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(patience.current.first_rank_seconds)


def leave(code: int) -> int:
    """Return the exit code of a rank that ends in good order with `code`.

    Where torchrun starts ranks again that do not end with 0, the code goes into its file and 0 is returned.
    """
    file = os.environ.get(EXIT_FILE_VARIABLE)
    if file is None or code == 0:
        return code
    Path(file).write_text(str(code), encoding="utf-8")
    return 0


def end_as_command(before: ExceptHook) -> ExceptHook:
    """Return what ends a script on a user's mistake as the command does: one paragraph, exit code 2.

    Args:
        before: What ends it on other errors.
    """

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, UserError):
            before(kind, error, trace)
            return
        if await_first_rank():
            print(error, file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code)

    return end
