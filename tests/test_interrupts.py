"""Ctrl-C while a program starts: real signals, in imports, in callbacks whose exceptions Python ignores."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

SLOW = """
import time
print("importing", flush=True)
time.sleep(0.6)
finished = True
"""


def interrupted(folder: Path, script: str, presses: int = 1) -> tuple[int, str, str]:
    """Run a script, interrupt it each time that it prints a line, and return how it ended."""
    (folder / "slow.py").write_text(SLOW)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    out, err = process.communicate(timeout=20)
    return process.returncode, first + out, err


def test_an_import_is_finished_before_ctrl_c_is_raised(tmp_path: Path) -> None:
    code, out, err = interrupted(
        tmp_path,
        """
        from holdfast.interrupts import raise_after_imports
        raise_after_imports()
        try:
            import slow
            for _ in range(10**9): pass
        except KeyboardInterrupt:
            print(slow.finished)
        """,
    )

    assert (code, out, err) == (0, "importing\nTrue\n", "")


def test_a_second_ctrl_c_does_not_wait_for_an_import(tmp_path: Path) -> None:
    code, out, err = interrupted(
        tmp_path,
        """
        from holdfast.interrupts import raise_after_imports
        raise_after_imports()
        try:
            import slow
        except KeyboardInterrupt:
            print("left it")
        """,
        presses=2,
    )

    assert (code, out, err) == (0, "importing\nleft it\n", "")


@pytest.mark.parametrize(
    "swallows",
    [
        "os.register_at_fork(before=wait)\nos.fork() or os._exit(0)",
        "class C:\n    def __del__(self): wait()\nC()",
        "import weakref\nclass C: pass\nc = C()\nr = weakref.ref(c, lambda _: wait())\ndel c",
    ],
    ids=["fork", "deletion", "weak reference"],
)
def test_ctrl_c_is_not_lost_where_python_ignores_exceptions(tmp_path: Path, swallows: str) -> None:
    script = f"""
import os, time
from holdfast.interrupts import raise_after_imports
raise_after_imports()
def wait():
    print("now", flush=True)
    time.sleep(0.5)
try:
{textwrap.indent(swallows, "    ")}
    time.sleep(10)
except KeyboardInterrupt:
    print("raised")
"""

    code, out, err = interrupted(tmp_path, script)

    assert (code, out.splitlines()[-1], err) == (0, "raised", "")


def test_whoever_takes_over_ctrl_c_hears_of_one_that_waited(tmp_path: Path) -> None:
    (tmp_path / "takes_over.py").write_text(
        "import signal, time\nprint('importing', flush=True)\ntime.sleep(0.01)\n"
        "signal.signal(signal.SIGINT, lambda *_: print('saving'))\ntime.sleep(0.5)\n"
    )
    code, out, err = interrupted(
        tmp_path,
        """
        from holdfast.interrupts import raise_after_imports
        raise_after_imports()
        import time
        time.sleep(0)
        import slow, takes_over
        """,
    )

    assert (code, err) == (0, "")
    assert out.splitlines() == ["importing", "importing", "saving"]


def test_before_anything_was_started_a_process_ends_at_once_with_one_sentence(tmp_path: Path) -> None:
    code, out, err = interrupted(
        tmp_path,
        """
        from holdfast.interrupts import end_at_once
        end_at_once(3, "stopped\\n")
        import slow
        print("never")
        """,
    )

    assert (code, out, err) == (3, "importing\n", "stopped\n")
