"""A rank that has done everything ends, although a thread of a user's goes on."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

SCRIPT = """
import sys, threading, time
from dataclasses import replace
from holdfast import patience
from holdfast.launch.rank import exit_in_time

patience.current = replace(patience.current, exit_word_seconds=0.2, threads_end_seconds=1.0)
threading.Thread(target=time.sleep, args=({seconds},), name="mine").start()
exit_in_time(3)
sys.exit(3)
"""


@pytest.mark.parametrize(("seconds", "is_named"), [(60, True), (0.5, True), (0, False)])
def test_a_thread_that_goes_on_is_named_and_waited_for_a_while(seconds: float, is_named: bool) -> None:
    began = time.monotonic()

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(seconds=seconds)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 3
    assert ("mine" in done.stderr) == is_named
    assert time.monotonic() - began < 30
