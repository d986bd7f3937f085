"""Lists the events of a run in order (starts, ends, saves, evaluations, alarms), each with its step and a sentence.

`metrics.jsonl` says where a resume went back to, `events.jsonl` what ended the start before. A start leaves an event of
its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.features.report.curves import Curves, Rewind, finite_number, is_step
from holdfast.features.report.formats import counted
from holdfast.files import size_words
from holdfast.text.escaping import escaped
from holdfast.text.shortening import shortened

Event = Mapping[str, Any]

_ENDINGS = ("failed", "stop", "done")
SILENT = "the run ended without a word, as after kill -9 or a power cut"
_LONGEST = 600
"""Characters of a sentence."""
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]*@")
_QUERY = re.compile(r"(?<=\S)\?[^\s?]*=\S*")
_ASSIGNED = re.compile(
    r"(?i)\b([\w-]*(?:api[_-]?key|token|secret|passw(?:or)?d|credentials?|authorization))(\s*[=:]\s*)(?:bearer\s+)?\S+"
)


@dataclass(frozen=True)
class Mark:
    """An event of a run, at its step."""

    kind: str
    """failed, stopped, resumed, saved, evaluated, alarm, exported, or other."""
    step: int
    text: str
    """A sentence for people, one line."""
    time: float | None = None
    """Seconds since 1970, where the run noted it."""


_OTHERS = {"back": "went back to an earlier step, as checkpoint.resume.from asked"}
ENTRY_KINDS = ("failed", "stopped", "resumed", "saved", "evaluated", "alarm", "exported", "other")


def public_sentence(text: str) -> str:
    """Return words that an error or an alarm used as one printable line without what could be a credential."""
    text = _QUERY.sub("?…", _CREDENTIALS.sub("", escaped(text)))
    text = _ASSIGNED.sub(r"\1\2…", text)
    return shortened(text, _LONGEST)


def marks_of(curves: Curves, events: Sequence[Event]) -> list[Mark]:
    """Return all marks of a run, in the order in which they happened; evaluations come last."""
    marks: list[Mark] = []
    offset = 0
    for rewind in curves.rewinds:
        end = _end_of_start(rewind, events, offset)
        start = events[end] if end < len(events) and events[end].get("event") == "start" else {}
        if not start and rewind.to == rewind.last:
            continue  # a start that found nothing to do
        marks += _within(events[offset:end])
        marks.append(_ending(rewind, events[offset:end]))
        marks.append(_resume(rewind, start))
        offset = end
    remaining = events[offset:]
    marks += _within(remaining)
    last = next((event for event in reversed(remaining) if event.get("event") in {"start", *_ENDINGS}), {})
    if last.get("event") in {"failed", "stop"}:
        marks.append(_end_mark(last, _step(last) if curves.last is None else max(curves.last, 0)))
    marks += [Mark("evaluated", step, f"evaluated at step {step}") for step in curves.evaluated]
    return marks


def _end_of_start(rewind: Rewind, events: Sequence[Event], offset: int) -> int:
    """Return the index behind the last event of the start that ended before a resume."""
    for index in range(offset, len(events)):
        event = events[index]
        if event.get("event") == "start" and _step(event) == rewind.to and index > offset:
            return index
    return next((i for i in range(offset, len(events)) if _step(events[i]) > rewind.last + 1), len(events))


def _within(events: Sequence[Event]) -> Iterator[Mark]:
    for event in events:
        name, step = event.get("event"), _step(event)
        match name:
            case "start" | "failed" | "stop" | "done":
                continue
            case "checkpoint":
                yield Mark("saved", _step(event, "saved"), _saved(event))
            case "health":
                yield Mark("alarm", step, public_sentence(str(event.get("text", event.get("alarm", "")))))
            case "export":
                path = str(event.get("path", "")).rstrip("/").rpartition("/")[2]
                yield Mark("exported", step, f"exported the model as {public_sentence(path)}")
            case _:
                yield Mark("other", step, _OTHERS.get(str(name)) or public_sentence(str(name).replace("_", " ")))


def _saved(event: Event) -> str:
    phrases = [f"checkpoint of step {_step(event, 'saved')} verified on disk"]
    size, seconds = finite_number(event.get("bytes")), finite_number(event.get("seconds"))
    phrases += [] if size is None else [size_words(size)]
    phrases += [] if seconds is None else [f"{seconds:.1f} s"]
    if event.get("before_error"):
        phrases.append("saved before an error ended the run")
    return ", ".join(phrases)


def _ending(rewind: Rewind, events: Sequence[Event]) -> Mark:
    event = next((candidate for candidate in reversed(events) if candidate.get("event") in _ENDINGS), None)
    return Mark("failed", rewind.last, SILENT) if event is None else _end_mark(event, rewind.last)


def _end_mark(event: Event, step: int) -> Mark:
    reason = public_sentence(str(event.get("reason", "")))
    seconds = finite_number(event.get("time"))
    match event.get("event"):
        case "failed":
            return Mark("failed", step, reason or "the run failed", seconds)
        case "stop":
            return Mark("stopped", step, f"stopped: {reason}" if reason else "stopped", seconds)
        case _:
            return Mark("stopped", step, "came to its end, and was started again later", seconds)


def _resume(rewind: Rewind, start: Event) -> Mark:
    lost = rewind.last - rewind.to
    if lost > 1:
        outcome = f"steps {rewind.to + 1} to {rewind.last} were made again"
    else:
        outcome = f"step {rewind.last} was made again" if lost == 1 else "no step was lost"
    ranks = f" on {counted(start['ranks'], 'rank')}" if isinstance(start.get("ranks"), int) else ""
    text = f"continued from step {rewind.to}{ranks}; {outcome}"
    return Mark("resumed", rewind.to, text, finite_number(start.get("time")))


def _step(event: Event, name: str = "step") -> int:
    value = event.get(name)
    return value if is_step(value) else 0
