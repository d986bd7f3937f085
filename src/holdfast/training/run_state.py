"""Determine whether a run is going on, has ended or died, from its small files; nothing is written or hashed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast import patience
from holdfast.checkpoint.place.layout import FOLDER, lease_name, lease_turns
from holdfast.files import died_here, is_of_here, parse_json, raise_unless_absent, read_bytes, read_json
from holdfast.metrics.sink import BY_METRIC, BY_OBSERVER, METRICS

_ENDINGS = ("done", "stop", "failed")
_SILENT = "nothing says how it ended"
_CLOCKS_SECONDS = 1.0
"""Largest difference that is expected between the clocks of a file system and of a machine."""


@dataclass(frozen=True)
class RunState:
    """State of a run, such as running or failed, and its reason."""

    name: Literal["running", "done", "stopped", "failed"]
    why: str


def state_of(run_directory: Path, events: Sequence[Mapping[str, Any]], step: int | None) -> RunState:
    """Return how the run in a directory stands.

    Args:
        run_directory: Of the run.
        events: Of its events.jsonl.
        step: Of the last line of its metrics.jsonl.

    Raises:
        OSError: Its lease cannot be read, or is not a file.
    """
    lease = newest_lease(run_directory)
    holder = {} if lease is None else _holder(lease)
    who = f"process {holder.get('pid', '?')} on {holder.get('host', 'another host')}"
    if lease is not None and holder and _is_alive(lease, holder):
        return RunState("running", who)
    report = _failure_report(run_directory)
    if report is not None:
        return RunState("failed", report)
    ending = _ending(events, step, run_directory / METRICS)
    # A holder that ended in good order has given its lease back.
    if holder and _number(ending.get("time")) < _number(holder.get("time")):
        return RunState("failed", f"{who} ended without a word")
    if ending:
        return _as_state(ending)
    return RunState("failed", _SILENT)


def newest_lease(run_directory: Path) -> Path | None:
    """Return the lease of a run's own place of checkpoints; None if it was never taken."""
    folder = run_directory / FOLDER
    try:
        turns = lease_turns(os.listdir(folder)).get("", [])  # noqa: PTH208 - pathlib's would make a path of each
    except OSError as error:
        raise_unless_absent(error)
        return None
    return folder / lease_name(max(turns)) if turns else None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 2**62 else 0.0


def _ending(events: Sequence[Mapping[str, Any]], step: int | None, metrics: Path) -> Mapping[str, Any]:
    """Return the event that ended the run; empty if there is none, or the run went on since.

    A launcher notes when the last rank had gone, whatever step it knows of. A rank notes the step it ends with.
    """
    last: Mapping[str, Any] = next((event for event in reversed(events) if event.get("event") in _ENDINGS), {})
    if "time" in last:
        since = metrics.exists() and metrics.stat().st_mtime > _number(last["time"]) + _CLOCKS_SECONDS
        return {} if since else last
    return last if _number(last.get("step")) >= (step or 0) else {}


def _as_state(ending: Mapping[str, Any]) -> RunState:
    reason = str(ending.get("reason", ""))
    if ending["event"] == "failed":
        return RunState("failed", reason)
    if ending["event"] == "done" or reason == BY_OBSERVER or reason.startswith(BY_METRIC):
        return RunState("done", reason)
    return RunState("stopped", reason)


def _holder(lease: Path) -> dict[str, Any]:
    """Return the holder of a run's lease; empty if the lease was released or never taken."""
    try:
        values = parse_json(read_bytes(lease) or b"{}")
    except (FileNotFoundError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _is_alive(lease: Path, holder: Mapping[str, Any]) -> bool:
    """Return whether a holder lives: by its process within this machine, by the age of its lease beyond."""
    if is_of_here(holder):
        facts = lease.parent.stat()  # a copy of a run that goes on does not
        return not died_here(holder) and holder.get("place") in {None, str((facts.st_dev, facts.st_ino))}
    return time.time() - lease.stat().st_mtime < patience.current.lease_stale_seconds


def _failure_report(run_directory: Path) -> str | None:
    """Return the first line of what a rank reported last, where a launcher was killed before it could tell."""
    run_directory = run_directory.absolute()
    reports = []
    for path in run_directory.parent.glob(f".{run_directory.name}.launch-*/failure-rank-*.json"):
        try:
            values = read_json(path)
            order = values["kind"] == "peer", float(values["time"])
            text = f"Rank {values['rank']}: {values['type']}: {values['message']}"
            reports.append((order, text.strip().partition("\n")[0]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return min(reports)[1] if reports else None


def json_lines(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects of whole lines; a kill may tear the last one."""
    values = []
    for line in text.splitlines():
        try:
            value = parse_json(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            values.append(value)
    return values
