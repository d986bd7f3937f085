"""The program that a RewardPool starts: `python -m holdfast.rewards.workers.worker LOG`.

It imports every reward file once and becomes the supervisor. Workers are forks of it, so that a further worker starts
in milliseconds and sees the same modules. Nothing here imports torch, nor any code of the rank's program.
"""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.rewards.base import CannotStart
from holdfast.rewards.functions.signatures import BatchedCall
from holdfast.rewards.processes import framing, kernel
from holdfast.rewards.scorers import ReadyReward, build
from holdfast.rewards.workers.supervisor import Supervisor
from holdfast.text.escaping import escaped_paragraph


def main() -> None:
    """Serve one pool until its rank closes it or dies."""
    requests, replies = take_channels(Path(sys.argv[1]))
    settings = framing.read_frame(requests)
    if settings is None:
        return
    setup: dict[str, Any] = pickle.loads(settings)  # noqa: S301 - from our own parent
    try:
        scorers = _build_all(setup, replies)
    except (CannotStart, ConfigError) as error:
        _say(replies, {"mistake": escaped_paragraph(str(error))})
        return
    sys.stdout.flush()
    kernel.adopt_orphans()
    # A collection in a worker would touch, and so copy, every page it shares with its siblings.
    gc.collect()
    gc.freeze()
    batched = [scorer.name for scorer in scorers if isinstance(scorer.bound, BatchedCall)]
    _say(replies, {"ready": {scorer.name: scorer.columns for scorer in scorers}, "batched": batched})
    Supervisor(scorers, setup, requests, replies).run()


def take_channels(log: Path) -> tuple[int, int]:
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


def _build_all(setup: dict[str, Any], replies: int) -> list[ReadyReward]:
    scorers = []
    for name, section in setup["rewards"]:
        _say(replies, {"building": name})
        scorers.append(build(section, name, Path(setup["base"]), setup["timeout_seconds"]))
    return scorers


def _say(replies: int, message: dict[str, Any]) -> None:
    framing.write(replies, json.dumps(message).encode())


if __name__ == "__main__":
    main()
