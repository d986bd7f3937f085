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
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.cli.warm import Done

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD, signal.SIGALRM)


OF_IMPORTS = {"TORCHINDUCTOR_CACHE_DIR"}
"""Variables that torch sets when a part of it is imported."""


def cli_in_process(*arguments: object, cwd: Path) -> Done:
    """Run `holdfast ARGUMENTS` by its entry point; a traceback is an error of the test.

    Code of a model's directory changes classes of transformers, so a command that trusts it needs its own process.

    Raises:
        AssertionError: Handlers of signals, the environment, threads or the directory differ afterwards.
    """
    from holdfast.cli.entry import main

    assert not any("trust" in str(argument) for argument in arguments)
    out, err = io.StringIO(), io.StringIO()
    before = state()
    with _own_process([str(argument) for argument in arguments], cwd, out, err):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    after = state()
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, f"`holdfast {' '.join(map(str, arguments))}` changed {', '.join(changed)}"
    return Done(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _own_process(arguments: list[str], cwd: Path, out: io.StringIO, err: io.StringIO) -> Iterator[None]:
    """Put back what a process may change: its handler of Ctrl-C, paths, loggers, words and random states."""
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


def state() -> dict[str, Any]:
    """Return what a command may not leave changed in a process."""
    return {
        "handlers": {number: signal.getsignal(number) for number in SIGNALS},
        "environment": {name: value for name, value in os.environ.items() if name not in OF_IMPORTS},
        "threads": {thread.name for thread in threading.enumerate()},
        "directory": os.getcwd(),  # noqa: PTH109
    }
