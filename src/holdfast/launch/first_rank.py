"""Print a user's mistake once under torchrun, where every rank raises it: rank 0 prints, the others stay silent."""

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
    """Return whether this rank prints an error that it raised before the ranks had joined.

    torchrun ends all ranks as soon as one has ended, so the other ranks wait until rank 0 has printed and ended. A rank
    that is still alive after the wait raised an error that rank 0 did not, or runs on another machine, whose output
    goes to another terminal or log; there the first local rank prints too.
    """
    if not under_torchrun() and (srun_task() or 0) > 0:
        _await_end()
        return True
    if not under_torchrun() or LAUNCH_DIRECTORY_VARIABLE in os.environ or os.environ["RANK"] == "0":
        return True
    _await_end()
    return os.environ.get("GROUP_RANK") == "0" or os.environ.get("LOCAL_RANK", "0") == "0"


def _await_end() -> None:
    """Wait for torchrun, or srun --kill-on-bad-exit, to end this rank once rank 0 has ended."""
    # A rank that leaves with an error is deaf to SIGTERM until it has said why; this one has nothing to say.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(patience.current.first_rank_seconds)


def leave(code: int) -> int:
    """Return the code with which a rank that ends in order with `code` must exit.

    Where torchrun would restart a rank that exits with another code than 0, `code` is written to a file for
    `launch.agent`, and 0 is returned.
    """
    file = os.environ.get(EXIT_FILE_VARIABLE)
    if file is None or code == 0:
        return code
    Path(file).write_text(str(code), encoding="utf-8")
    return 0


def end_as_command(before: ExceptHook) -> ExceptHook:
    """Return a `sys.excepthook` that reports a user's mistake as the commands do: one paragraph, exit code 2.

    Args:
        before: The hook for all other errors.
    """

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, UserError):
            before(kind, error, trace)
            return
        if await_first_rank():
            print(error, file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code)

    return end
