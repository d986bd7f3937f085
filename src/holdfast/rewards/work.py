"""What reward workers do: score the samples of a task. Nothing here imports torch."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.processes.forks import Tell, Work, print_traceback
from holdfast.processes.user_code import describe_error
from holdfast.rewards.base import MissingArgument, Sample, SampleOutcome, is_number, outcome_of_exception
from holdfast.rewards.evaluation import evaluate
from holdfast.rewards.functions.signatures import BatchedCall, PerSampleCall
from holdfast.rewards.scorers import ReadyReward, build


def make_work(setup: Mapping[str, Any], importing: Callable[[str], None]) -> Work:
    """Import every reward of a setup.

    Raises:
        CannotStart, ConfigError: A reward cannot work.
    """
    scorers = []
    for name, section in setup["rewards"]:
        importing(f"reward {name}")
        scorers.append(build(section, name, Path(setup["base"]), setup["timeout_seconds"]))
    clears = [scorer.clear for scorer in scorers if scorer.clear is not None]
    ready = [
        {
            "columns": scorer.columns,
            "seconds": scorer.seconds,
            "is_batched": isinstance(scorer.bound, BatchedCall),
            "is_alone": isinstance(scorer.bound, PerSampleCall),
        }
        for scorer in scorers
    ]
    return Work({"rewards": ready}, partial(_serve, scorers), _is_answer, clear=partial(_clear, clears))


def _clear(clears: Sequence[Callable[[int], None]], pid: int) -> None:
    for clear in clears:
        clear(pid)


def _is_answer(value: object) -> bool:
    match value:
        case {"place": int(), "outcome": None, **others}:
            return not others
        case {
            "place": int(),
            "outcome": {
                "value": None | int() | float() as main,
                "parts": dict(parts),
                "metrics": dict(metrics),
                "fault": None | "timeout" | "error" | "nan" | "none",
                "message": str(),
                "is_cut_short": bool(),
                "is_malformed": bool(),
                **fields,
            },
            **others,
        }:
            numbers = [*metrics.values(), *(part for part in parts.values() if part is not None)]
            are_finite = all(
                isinstance(number, int | float) and abs(number) <= sys.float_info.max for number in numbers
            )
            return not others and not fields and are_finite and (main is None or is_number(main))
    return False


def _serve(scorers: Sequence[ReadyReward], requests: Iterator[bytes], tell: Tell) -> None:
    """Answer tasks: the index of a reward, and pickled samples. There is one answer for each."""

    def say(place: int, outcome: SampleOutcome | None) -> None:
        tell(json.dumps({"place": place, "outcome": None if outcome is None else asdict(outcome)}).encode())

    for request in requests:
        reward, packed = pickle.loads(request)  # noqa: S301 - from our own rank
        samples: dict[int, Sample] = {}
        for place, packed_sample in enumerate(packed):
            try:
                samples[place] = pickle.loads(packed_sample)  # noqa: S301 - likewise
            except Exception as error:  # noqa: BLE001 - whatever a column's class does when it is rebuilt
                say(place, SampleOutcome(fault="error", message=f"cannot see the row: {describe_error(error)}"))
        # SystemExit is a fault of the sample, too.
        evaluate(scorers[reward].bound, scorers[reward].name, samples, say, _failed, BaseException)


def _failed(error: BaseException) -> SampleOutcome:
    if not isinstance(error, MissingArgument):
        print_traceback(error)
    return outcome_of_exception(error)
