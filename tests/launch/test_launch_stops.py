"""Ctrl-C and SIGTERM: the first is passed on once, the second ends everything."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

SAVING = """
    def stop(number, frame):
        with open(here / f"asked-{rank}", "a") as file:
            print(signal.Signals(number).name, file=file)
        time.sleep(0.5)
        (here / f"saved-{rank}").touch()
        sys.exit(3)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    (here / f"ready-{rank}").touch()
    time.sleep(600)
"""

STUBBORN = """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child(True)
    (here / f"ready-{rank}").touch()
    time.sleep(600)
"""


def start(ground, script):
    """Start a launcher as a shell does: at the head of a process group, which a terminal's Ctrl-C reaches whole."""
    launcher = subprocess.Popen(
        ground.driver(script, max_restarts=1),
        env=ground.environ,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    ground.wait_for(lambda: all((ground.path / f"ready-{rank}").exists() for rank in range(2)))
    return launcher


@pytest.mark.parametrize(
    ("number", "name", "words"),
    [(signal.SIGINT, "SIGINT", "A second Ctrl-C stops now"), (signal.SIGTERM, "SIGTERM", "A second SIGTERM stops now")],
)
def test_the_first_request_reaches_every_rank_once_and_they_save(ground, number, name, words):
    launcher = start(ground, SAVING)

    os.killpg(launcher.pid, number)
    _, shown = launcher.communicate(timeout=20)

    assert launcher.returncode == 3
    assert (ground.path / "asked-0").read_text() == f"{name}\n"
    assert (ground.path / "asked-1").read_text() == f"{name}\n"
    assert (ground.path / "saved-0").exists()
    assert (ground.path / "saved-1").exists()
    assert shown.count("\n") == 1
    assert words in shown
    assert ground.hidden() == []


@pytest.mark.cases(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_request_ends_everything_within_10_seconds(ground, number):
    launcher = start(ground, STUBBORN)

    os.killpg(launcher.pid, number)
    time.sleep(0.5)
    assert launcher.poll() is None
    os.killpg(launcher.pid, number)
    began = time.monotonic()
    _, shown = launcher.communicate(timeout=20)

    assert time.monotonic() - began < 10
    assert launcher.returncode == 3
    assert shown.endswith("Stopping now.\n")
    assert len(ground.pids()) == 4
    assert ground.alive() == []


SAVES_AND_GOES_ON = """
    time.sleep(0.5)
    (here / f"ready-{rank}").touch()
    time.sleep(0.5)
    def save(number, frame):
        with open(here / f"saves-{rank}", "a") as file:
            print(signal.Signals(number).name, file=file)
    signal.signal(signal.SIGUSR1, save)
    (here / f"can-save-{rank}").touch()
    while not (here / "end").exists():
        time.sleep(0.02)
"""


def test_a_request_to_save_waits_for_the_first_rank_and_is_no_stop(ground):
    launcher = start(ground, SAVES_AND_GOES_ON)

    launcher.send_signal(signal.SIGUSR1)  # no rank has a handler yet: it would die
    time.sleep(0.2)
    assert not (ground.path / "can-save-0").exists()
    ground.wait_for((ground.path / "saves-0").exists)
    launcher.send_signal(signal.SIGUSR1)
    ground.wait_for(lambda: (ground.path / "saves-0").read_text() == "SIGUSR1\n" * 2)
    (ground.path / "end").touch()
    _, shown = launcher.communicate(timeout=20)

    assert launcher.returncode == 0
    assert shown == "SIGUSR1: the ranks save after their step and go on.\n" * 2
    assert not (ground.path / "saves-1").exists()


def test_a_rank_that_cannot_save_yet_just_stops(ground):
    launcher = start(ground, "(here / f'ready-{rank}').touch()\ntime.sleep(600)")

    os.killpg(launcher.pid, signal.SIGINT)
    _, shown = launcher.communicate(timeout=20)

    assert launcher.returncode == 3
    assert "was killed" not in shown


def test_ranks_that_finish_in_spite_of_a_request_are_done(ground):
    script = SAVING.replace("sys.exit(3)", "sys.exit(0)")
    launcher = start(ground, script)

    os.killpg(launcher.pid, signal.SIGINT)
    launcher.communicate(timeout=20)

    assert launcher.returncode == 0


def test_a_death_after_a_request_is_named_and_not_restarted(ground):
    launcher = start(ground, SAVING.replace("sys.exit(3)", "raise OSError('disk full')"))

    os.killpg(launcher.pid, signal.SIGTERM)
    _, shown = launcher.communicate(timeout=20)

    assert launcher.returncode == 3
    assert "OSError: disk full" in shown
    assert "Restart" not in shown


def test_handlers_of_the_caller_come_back(ground):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    ground.launch("pass", ranks=1)

    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
