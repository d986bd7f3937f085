"""Is the state beside the tensors what a run writes? Asked before a tensor of the run is touched.

Hashes find accidents. A file that was edited, or written by somebody else's tool, fits its hashes and still may hold
anything: a run must not find that out when half of it stands at another step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from holdfast.training.run import Run


def check_saved_state(run: Run, shared: Mapping[str, Any], step: int) -> None:
    """Compare trainer.json with what this run would write.

    Args:
        run: Built, and not changed by this.
        shared: The file's content.
        step: Of the manifest.

    Raises:
        ValueError, TypeError, KeyError: The first difference, by its place in the file.
    """
    own = run.state.as_plain()
    for section in ("state", "stream"):
        _object(section, shared[section])
    # What a later version remembers besides begins as it does in a new run.
    _same_shape("state", own, own | shared["state"])
    _same_shape("stream", run.stream.state(), shared["stream"])
    for name, value in shared["state"].get("controllers", {}).items():
        _same_shape(f"state.controllers.{name}", 0.0, value)
    if shared["state"]["step"] != step:
        raise ValueError(f"state.step is {shared['state']['step']}, and the checkpoint is of step {step}")
    needed = max((index for index, size in enumerate(run.stream.state()["sizes"]) if size is None), default=-1)
    if len(shared["stream"]["sizes"]) <= needed:
        raise ValueError(f"stream.sizes has {len(shared['stream']['sizes'])} entries, for {needed + 1} sources or more")


def _same_shape(where: str, own: Any, found: Any) -> None:
    """Compare one value with what this run has in its place.

    Raises:
        ValueError, TypeError: It is of another kind.
    """
    match own:
        case dict():
            _same_mapping(where, own, found)
        case list():
            _same_list(where, own, found)
        case bool() | str():
            _must(type(found) is type(own), where, found, f"no {type(own).__name__}")
        case int():
            _must(type(found) is int and found >= 0, where, found, "no count")
        case _:
            _must(found is None or _is_number(found), where, found, "no number")


def _must(fits: bool, where: str, found: Any, words: str) -> None:
    if not fits:
        raise ValueError(f"{where} is {_short(found)}, {words}")


def _same_list(where: str, own: list[Any], found: Any) -> None:
    _must(isinstance(found, list) and bool(found) >= bool(own), where, found, "no list")
    for index, item in enumerate(found if own else ()):
        _same_shape(f"{where}[{index}]", own[min(index, len(own) - 1)], item)


def _same_mapping(where: str, own: Mapping[str, Any], found: Any) -> None:
    _object(where, found)
    if not own:  # filled as a run goes on, by whoever has something to remember
        return
    strange = sorted(set(own) ^ set(found))
    if strange:
        raise ValueError(f"{where}.{strange[0]} is {'missing' if strange[0] in own else 'unknown'}")
    for name, value in own.items():
        _same_shape(f"{where}.{name}", value, found[name])


def _object(where: str, found: Any) -> None:
    if not isinstance(found, dict):
        raise TypeError(f"{where} is {_short(found)}, no object")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
