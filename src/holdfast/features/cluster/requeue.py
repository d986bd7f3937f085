"""Decides whether Slurm requeues a job that has ended. The decision rests on what rank 0 wrote, never on an exit code
alone.

The batch script of `holdfast launch slurm` runs it as `python -m holdfast.features.cluster.requeue RUN_DIR JOB`;
exit code 0 requeues.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from holdfast.cli.commands.runs import last_step, read_events
from holdfast.files import append_text
from holdfast.metrics.sink import METRICS
from holdfast.training.directory import EVENTS, IDENTITY
from holdfast.training.run_state import state_of

_MOST_AT_ONE_STEP = 3
_EVENT = "requeue"


def decide(directory: Path, job: str) -> tuple[bool, str]:
    """Return whether a job is requeued, and why, in a sentence for its log; a requeue is noted in the run's events.

    Args:
        directory: The run's directory.
        job: Its number, to tell its requeues from an earlier job's.
    """
    if not (directory / IDENTITY).exists():
        return False, f"{directory} holds no run: it was refused before its first step. The job is not requeued."
    events, step = read_events(directory / EVENTS), last_step(directory / METRICS)
    state = state_of(directory, events, step)
    if state.name == "done":
        return False, "The run is done."
    at = step or 0
    earlier = [event for event in events if event.get("event") == _EVENT and event.get("job") == job]
    here = sum(event.get("step") == at for event in earlier)
    why = f"The run is {state.name} at step {at}" + (f": {state.why}" if state.why else "") + "."
    if here >= _MOST_AT_ONE_STEP:
        return False, f"{why} It was requeued {here} times at this step, so it is not again: the cause is not chance."
    line = {"event": _EVENT, "step": at, "job": job, "reason": state.why, "time": time.time()}
    append_text(directory / EVENTS, json.dumps(line) + "\n")
    return True, f"{why} Job {job} is requeued, {here + 1} of at most {_MOST_AT_ONE_STEP} times at this step."


def main() -> int:
    """Decide for the run and the job of the command line; 0: requeue, 1: do not."""
    again, reason = decide(Path(sys.argv[1]), sys.argv[2])
    print(reason, flush=True)
    return 0 if again else 1


if __name__ == "__main__":
    sys.exit(main())
