"""The command in the process of the tests: for refusals, words, and looks at finished runs."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import psutil
import torch

from tests.cli.warm import Done

SET_BY_IMPORTS = {"TORCHINDUCTOR_CACHE_DIR"}
"""Variables that torch sets when a part of it is imported."""


def cli_in_process(*arguments: object, cwd: Path) -> Done:
    """Run `holdfast ARGUMENTS` by its entry point; a traceback is an error of the test.

    Exit code and streams are those of a process. Imports made before stay, and what was read of the environment at an
    import is the worker's.

    Raises:
        AssertionError: The command left something changed that is in `GLOBALS`; it is put back where it can be.
    """
    from holdfast.cli.entry import main

    words = [str(argument) for argument in arguments]
    # Code of a model's directory changes classes of transformers. Files that ask for it are not looked at.
    assert not any(word == "--trust-remote-code" or "trust_remote_code=" in word for word in words)
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="strict")
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")
    before = {name: part.read() for name, part in GLOBALS.items()}
    code = 0
    try:
        with _own_process(words, cwd, out, err):
            try:
                main()
            except SystemExit as end:
                code = _exit_code(end, err)
    finally:
        changed = _put_back(before)
        assert not changed, f"`holdfast {' '.join(words)}` changed {', '.join(changed)}"
    return Done(code, _written(out), _written(err))


def _exit_code(end: SystemExit, err: TextIO) -> int:
    """Return what Python makes of an exit; a text is written as Python does."""
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 255
    print(end.code, file=err)
    return 1


def _written(stream: TextIO) -> str:
    stream.seek(0)
    return stream.read()


@contextlib.contextmanager
def _own_process(arguments: list[str], cwd: Path, out: TextIO, err: TextIO) -> Iterator[None]:
    """Put back what every command may change: its handler of Ctrl-C, paths, loggers, words and random states."""
    python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    handler, hook, words, paths = signal.getsignal(signal.SIGINT), sys.unraisablehook, sys.argv, list(sys.path)
    levels = {name: each.level for name, each in _loggers().items()}
    sys.argv = ["holdfast", *arguments]
    try:
        with (
            contextlib.chdir(cwd),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            yield
    finally:
        signal.signal(signal.SIGINT, handler)
        sys.unraisablehook, sys.argv, sys.path[:] = hook, words, paths
        random.setstate(python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        torch.set_rng_state(of_torch)
        for name, each in _loggers().items():
            each.setLevel(levels.get(name, logging.NOTSET))


def _loggers() -> dict[str, logging.Logger]:
    return {name: each for name, each in logging.root.manager.loggerDict.items() if isinstance(each, logging.Logger)}


class Global(NamedTuple):
    """How a part of a process's state is read, and put back where it can be."""

    read: Callable[[], Any]
    put_back: Callable[[Any], object] | None = None


def _set_handlers(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not signal.getsignal(number) and handler is not None:
            signal.signal(number, handler)


def _umask() -> int:
    mask = os.umask(0o77)
    os.umask(mask)
    return mask


def _alarm() -> float | None:
    """Return when the timer that pytest's time limit uses too will ring; None: never."""
    seconds, _ = signal.getitimer(signal.ITIMER_REAL)
    return time.monotonic() + seconds if seconds else None


def _set_alarm(due: float | None) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0 if due is None else max(due - time.monotonic(), 0.001))


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in SET_BY_IMPORTS}


def _set_environment(values: Mapping[str, str]) -> None:
    for name in _environment().keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)


def _set_root_logger(level_and_handlers: tuple[int, list[logging.Handler]]) -> None:
    logging.root.level, logging.root.handlers[:] = level_and_handlers


def _children() -> set[int]:
    """Return the ids of this process's children, also of ended ones that nobody has waited for."""
    return {child.pid for child in psutil.Process().children()}


GLOBALS = {
    "handlers of signals": Global(
        lambda: {number: signal.getsignal(number) for number in signal.valid_signals()}, _set_handlers
    ),
    "blocked signals": Global(
        lambda: sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        lambda blocked: signal.pthread_sigmask(signal.SIG_SETMASK, blocked),
    ),
    "the alarm": Global(_alarm, _set_alarm),
    "the umask": Global(_umask, os.umask),
    "the environment": Global(_environment, _set_environment),
    "the root logger": Global(lambda: (logging.root.level, [*logging.root.handlers]), _set_root_logger),
    "torch's threads": Global(torch.get_num_threads, torch.set_num_threads),
    "torch's default dtype": Global(torch.get_default_dtype, torch.set_default_dtype),
    "torch's gradients": Global(torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's determinism": Global(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "threads": Global(lambda: {thread.name for thread in threading.enumerate()}),
    "children": Global(_children),
}
"""What a command may not leave changed in a process, beside its handler of Ctrl-C."""


def _put_back(before: Mapping[str, Any]) -> list[str]:
    """Return the names of what has changed, and put it back."""
    changed = []
    for name, was in before.items():
        part, value = GLOBALS[name], GLOBALS[name].read()
        if _differs(was, value):
            changed.append(name)
            if part.put_back is not None:
                part.put_back(was)
    return changed


def _differs(was: Any, value: Any) -> bool:
    if isinstance(was, set) and isinstance(value, set):
        return not value <= was  # another test's thread may end meanwhile
    if isinstance(was, float) and isinstance(value, float):
        return abs(was - value) > 1.0
    return bool(was != value)
