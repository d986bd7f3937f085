"""The program that a rank starts: `python -m holdfast.processes.worker LOG ENTRY`.

ENTRY is `module:function`. The function takes the setup that the rank sends, which is plain values, and something that
says what is being imported; it imports the user's files and returns a `Work`. Then the program is the fork server.
Workers are forks of it, so that a further worker starts in milliseconds and sees the same modules. Nothing here imports
torch, nor any code of the rank's program.
"""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast import registry
from holdfast.errors import ConfigError
from holdfast.processes import framing, kernel
from holdfast.processes.forks import Work
from holdfast.processes.server import ForkServer
from holdfast.processes.user_code import CannotStart
from holdfast.text.escaping import escaped_paragraph


def main() -> None:
    """Serve one pool until its rank closes it or dies."""
    requests, replies = _take_channels(Path(sys.argv[1]))
    entry: Callable[[Any, Callable[[str], None]], Work] = registry.load(sys.argv[2])
    setup = framing.read_frame(requests)
    if setup is None:
        return

    def say(name: str, value: object) -> None:
        framing.write(replies, json.dumps({name: value}).encode())

    try:
        work = entry(pickle.loads(setup), lambda subject: say("importing", subject))  # noqa: S301 - from our own parent
    except (CannotStart, ConfigError) as error:
        say("mistake", escaped_paragraph(str(error)))
        return
    sys.stdout.flush()
    kernel.adopt_orphans()
    # A collection in a worker would touch, and so copy, every page it shares with its siblings.
    gc.collect()
    gc.freeze()
    say("ready", work.ready)
    ForkServer(work, requests, replies).run()


def _take_channels(log: Path) -> tuple[int, int]:
    """Move the channels from descriptors 0 and 1 to new ones, and redirect what user code prints to the log."""
    # User code prints to descriptor 1 and may read from 0; on the channel itself, its text would be taken for a reply.
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, descriptor in ((nothing, 0), (printed, 1), (printed, 2)):
        os.dup2(source, descriptor)
    os.close(nothing)
    os.close(printed)
    for stream in (sys.stdout, sys.stderr):
        # A completion with half an emoji is no fault of the function that prints it.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    return requests, replies


if __name__ == "__main__":
    main()
