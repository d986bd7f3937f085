"""Turns errors and Ctrl-C into messages and exit codes, at the edge of the process."""

from __future__ import annotations

import sys
from collections.abc import Callable

from holdfast.errors import HoldfastError, RunStopped, UserError
from holdfast.interrupts import raise_after_imports

_INTERRUPTED = 130
"""What typer makes of a KeyboardInterrupt, without a word."""


def run(app: Callable[[], object]) -> None:
    """Run the command line; a user's mistake is one paragraph, never a traceback."""
    raise_after_imports()
    try:
        app()
    except SystemExit as error:
        if error.code != _INTERRUPTED:
            raise
        print("Ctrl-C: stopped before the end.", file=sys.stderr)
        sys.exit(RunStopped.exit_code)
    except HoldfastError as error:
        from holdfast.launch.first_rank import await_first_rank, leave

        if await_first_rank():
            print(error, file=sys.stderr)
        sys.exit(leave(error.exit_code))
    except OSError as error:
        from holdfast.files import NotRegular

        if not isinstance(error, NotRegular):
            raise
        print(f"{error}. Put the file back, or remove what stands in its place.", file=sys.stderr)
        sys.exit(UserError.exit_code)
