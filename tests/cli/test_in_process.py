"""A command in the process of the tests ends as a process does, and what it leaves changed is noticed and put back."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cli.in_process import GLOBALS, cli_in_process
from tests.cli.warm import run

LEAKS: dict[str, Callable[[], object]] = {
    "handlers of signals": lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
    "blocked signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]),
    "the alarm": lambda: signal.setitimer(signal.ITIMER_REAL, 6000),
    "the umask": lambda: os.umask(0o27),
    "the environment": lambda: os.environ.update(LEFT="1"),
    "the root logger": lambda: logging.basicConfig(level=logging.DEBUG, force=True),
    "torch's threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch's default dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch's gradients": lambda: torch.set_grad_enabled(False),
    "torch's determinism": lambda: torch.use_deterministic_algorithms(True),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", LEAKS)
def test_what_a_command_leaves_changed_is_noticed_and_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fails: bool
) -> None:
    def leak() -> None:
        LEAKS[name]()
        if fails:
            raise ZeroDivisionError

    monkeypatch.setattr("holdfast.cli.entry.main", leak)
    before = GLOBALS[name].read()

    with pytest.raises(AssertionError) as raised:
        cli_in_process("version", cwd=tmp_path)

    assert str(raised.value).partition("\n")[0] == f"`holdfast version` changed {name}"
    assert isinstance(raised.value.__context__, ZeroDivisionError) == fails
    after = GLOBALS[name].read()
    assert after == (pytest.approx(before, abs=1) if isinstance(before, float) else before)


def test_a_child_that_nobody_waited_for_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr("holdfast.cli.entry.main", lambda: started.append(subprocess.Popen(["true"])))

    with pytest.raises(AssertionError, match="changed children"):
        cli_in_process("version", cwd=tmp_path)

    assert started[0].wait() == 0


@pytest.mark.parametrize(
    "program",
    [
        "sys.exit('stopped')",
        "sys.exit(258)",
        "sys.exit(-1)",
        "sys.exit()",
        "print('a\\r\\nb\u00fc'); print('\\ud800', file=sys.stderr)",
    ],
)
def test_exit_codes_and_streams_are_those_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr("holdfast.cli.entry.main", lambda: exec(program, {"sys": sys}))  # noqa: S102 - above

    assert cli_in_process(cwd=tmp_path) == run([sys.executable, "-c", f"import sys; {program}"], cwd=tmp_path)


def test_text_that_no_process_can_print_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.cli.entry.main", lambda: print("\ud800"))

    with pytest.raises(UnicodeEncodeError):
        cli_in_process(cwd=tmp_path)
