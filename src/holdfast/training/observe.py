"""Observers: a user's functions that see every step and may ask for a stop, a save or an evaluation."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError, RunStopped
from holdfast.files import load_module
from holdfast.text.escaping import error_words
from holdfast.types import StepEvent

ANSWERS = ("stop", "save", "evaluate")


class ObserverFailed(RunStopped):  # noqa: N818 - the name says what happened
    """An observer raised, returned an unknown request, or kept state that JSON cannot hold; the run was saved."""


@dataclass
class Observer:
    """A user's function that is called after every step, and its state.

    The function takes a `StepEvent`. If it has a second parameter, it also gets a dictionary whose contents are saved
    with the run and restored at a resume.
    """

    name: str
    function: Callable[..., object]

    def __post_init__(self) -> None:
        """Note whether the function wants a state."""
        try:
            self._takes_state = len(inspect.signature(self.function).parameters) > 1
        except (TypeError, ValueError) as error:
            raise ConfigError(f"observers: {self.name} is no function of an event: {error}.") from error

    def __call__(self, event: StepEvent, state: dict[str, Any]) -> frozenset[str]:
        """Return what the observer asks for.

        Raises:
            ObserverFailed: It raised, or answered something else.
        """
        try:
            answer = self.function(event, state) if self._takes_state else self.function(event)
            json.dumps(state, allow_nan=False)
            answers = [] if answer is None else [answer] if isinstance(answer, str) else list(answer)  # type: ignore[call-overload]
        except (Exception, SystemExit) as error:  # an exit would leave the other ranks waiting
            raise ObserverFailed(f"Observer {self.name} failed at step {event.step}: {error_words(error)}.") from error
        wrong = [item for item in answers if item not in ANSWERS]
        if wrong:
            raise ObserverFailed(
                f"Observer {self.name} answered {wrong[0]!r} at step {event.step}; it may answer "
                f"{', '.join(ANSWERS)} or None."
            )
        return frozenset(answers)


def ask(observers: Iterable[Observer], event: StepEvent, states: dict[str, Any]) -> frozenset[str]:
    """Ask all observers; rank 0 does this and tells the others."""
    answers: frozenset[str] = frozenset()
    for observer in observers:
        answers |= observer(event, states.setdefault(observer.name, {}))
    return answers


def find_script(path: str, base: Path, key: str) -> Path:
    """Return the file of `file.py:name`, looked up beside the YAML, then from the current directory.

    Raises:
        ConfigError: It is not there.
    """
    file = path.rpartition(":")[0]
    script = next((candidate for candidate in (base / file, Path(file)) if candidate.is_file()), None)
    if script is None:
        raise ConfigError(f"{key}: there is no file {file} beside the YAML ({base}) or in {Path.cwd()}.")
    return script


def load_function(path: str, base: Path, key: str) -> Callable[..., Any]:
    """Import `file.py:name`, looked up beside the YAML, then from the current directory.

    Raises:
        ConfigError: The file or the function is not there, or the file raises when it is imported.
    """
    script, name = find_script(path, base, key), path.rpartition(":")[2]
    digest = hashlib.sha256(str(script.resolve()).encode()).hexdigest()[:8]
    try:
        module = load_module(script, f"holdfast_user_{script.stem}_{digest}")
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: {script} raises when it is imported: {type(error).__name__}: {error}.") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [item for item, value in vars(module).items() if callable(value) and not item.startswith("_")]
        raise ConfigError(f"{key}: {script} has no function {name}. It has {', '.join(functions) or 'none'}.")
    return function  # type: ignore[no-any-return]  # checked to be callable
