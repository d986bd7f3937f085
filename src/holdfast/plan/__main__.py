"""The process that executes a plan: the guard must be loaded before torch, so it is a process of its own.

It reads a request as JSON from standard input and leaves the plan as JSON in a file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.plan.guard import NoGuard, load_guard
from holdfast.quiet import hush


def main() -> None:
    """Answer the request on standard input."""
    hush()
    request = json.load(sys.stdin)
    output = Path(request["output"])
    try:
        answer: dict[str, Any] = {"plan": _planned(request)}
    except HoldfastError as error:
        answer = {"error": str(error), "exit_code": error.exit_code}
    output.write_text(json.dumps(answer), encoding="utf-8")


def _planned(request: dict[str, Any]) -> dict[str, Any]:
    reason = ""
    if request["device"] != "cpu":
        try:
            load_guard()
        except NoGuard as error:
            reason = str(error).rstrip(".")
    from holdfast.plan.request import planned

    return planned(request, reason)


if __name__ == "__main__":
    main()
