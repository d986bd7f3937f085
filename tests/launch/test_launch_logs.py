"""Logs: hidden until the run directory exists, appended to on every start, plain lines even from a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import rich

import holdfast
from holdfast.config.sections.launch import LaunchConfig
from holdfast.errors import ConfigError
from holdfast.launch.local import launch_local
from holdfast.launch.terminal import PlainLines

HEADER = re.compile(r"--- rank (\d) of (\d), attempt (\d), \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d ---")


def test_logs_move_into_the_run_directory_while_ranks_write_to_them(ground):
    code = ground.launch("""
        print("before", rank, file=sys.stderr, flush=True)
        all_started()
        if rank == 0:
            make_run()
        while not (run / "logs" / f"rank-{rank}.log").exists():
            time.sleep(0.02)
        print("after", rank, flush=True)
    """)

    assert code == 0
    assert ground.hidden() == []
    for rank in range(2):
        header, *lines = (ground.run / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert HEADER.fullmatch(header).groups() == (str(rank), "2", "1")
        assert lines == [f"before {rank}", f"after {rank}"]


def test_a_short_run_still_finds_its_logs_in_the_run_directory(ground):
    ground.launch("make_run()\nprint('done')", ranks=1)

    assert (ground.run / "logs" / "rank-0.log").read_text().endswith("\ndone\n")


def test_restarts_and_second_starts_append_under_a_header_of_their_own(ground):
    script = "print('try', attempt())\nrun.exists() or make_run()\nsys.exit(attempt() == 2)"

    ground.launch(script, ranks=1, max_restarts=1)
    ground.launch(script, ranks=1)

    log = (ground.run / "logs" / "rank-0.log").read_text()
    assert [match.group(3) for match in HEADER.finditer(log)] == ["1", "2", "1"]
    assert re.findall("try (.)", log) == ["1", "3", "5"]


def test_both_streams_of_rank_0_keep_their_places(ground, capfd):
    ground.launch("print('out')\nprint('err', file=sys.stderr)\nmake_run()", ranks=1)

    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("out\n", "err\n")
    log = (ground.run / "logs" / "rank-0.log").read_text()
    assert "\nout\n" in log
    assert "\nerr\n" in log


def test_a_reader_that_goes_away_does_not_stop_the_run(ground):
    script = "make_run()\nfor line in range(20000): print('a line of output', line)\n(here / 'finished').touch()"
    launcher = subprocess.Popen(ground.driver(script, ranks=1), env=ground.environ, stdout=subprocess.PIPE, text=True)
    launcher.stdout.readline()
    launcher.stdout.close()

    assert launcher.wait(timeout=20) == 0
    assert (ground.path / "finished").exists()
    assert "a line of output 19999" in (ground.run / "logs" / "rank-0.log").read_text()


def test_a_run_dir_that_cannot_be_made_is_refused_by_name(ground):
    (ground.path / "file").write_text("")
    run = ground.path / "file" / "runs" / "demo"

    with pytest.raises(ConfigError, match=r"run\.dir=.*file/runs cannot be written"):
        launch_local(["true"], 1, LaunchConfig(), run)


def run_in_a_terminal(ground, script, columns=91):
    """Return what a terminal of a width receives, and the exit code."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environ = {name: value for name, value in ground.environ.items() if name not in {"COLUMNS", "LINES"}}
    environ["TERM"] = "xterm"
    launcher = subprocess.Popen(ground.driver(script, ranks=1), env=environ, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    try:
        while chunk := os.read(master, 65536):
            shown += chunk
    except OSError:
        pass
    os.close(master)
    return shown.decode(), launcher.wait(timeout=20)


WITH_PACKAGES = f"""
        sys.path[:0] = {[str(Path(module.__file__).parents[1]) for module in (rich, holdfast)]!r}
        make_run()
"""


def test_rank_0_hears_whether_a_terminal_shows_its_output_and_how_wide_it_is(ground, capfd, monkeypatch):
    script = f"""{WITH_PACKAGES}
        from rich.console import Console
        print(sys.stdout.isatty(), Console().is_interactive, Console().width)
    """

    shown, code = run_in_a_terminal(ground, script)

    assert (shown, code) == ("False True 91\r\n", 0)
    shutil.rmtree(ground.run)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert ground.launch(script, ranks=1) == 0
    assert capfd.readouterr().out.startswith("False False ")


@pytest.mark.cases("all")
@pytest.mark.parametrize("columns", [91, 30])
def test_the_progress_bar_is_live_on_the_terminal_and_one_plain_line_in_the_log(ground, columns):
    script = f"""{WITH_PACKAGES}
        from holdfast.metrics.progress import End, open_progress
        progress = open_progress("auto", End(9))
        for number in range(9):
            progress.say(f"saved {{number}}")
            print("printed", number)
            progress.update(number + 1, {{"loss": number / 8, "grad_norm": 1.0, "learning_rate": 0.1}})
            time.sleep(0.15)
        progress.close()
    """

    shown, code = run_in_a_terminal(ground, script, columns)

    log = (ground.run / "logs" / "rank-0.log").read_text()
    assert code == 0
    assert shown.count("\x1b[2K") >= 9
    assert "\x1b" not in log
    lines = [line for line in log.splitlines()[1:] if line]
    words = ("saved", "printed")
    assert lines[:-1] == [f"{word} {number}" for number in range(9) for word in words]
    assert "loss 1.0000" in lines[-1]
    assert len(lines[-1]) <= columns


def test_a_killed_progress_bar_gives_the_cursor_back(ground):
    shown, code = run_in_a_terminal(
        ground, "sys.stdout.write('\\x1b[?25l')\nsys.stdout.flush()\nos.kill(os.getpid(), 9)"
    )

    assert code == 3
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert "Rank 0 was killed by SIGKILL" in shown


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("plain\nlines\n", "plain\nlines\n"),
        ("windows\r\nends\r\n", "windows\nends\n"),
        ("10%\r50%\r100%\nnext\n", "100%\nnext\n"),
        ("\x1b[31mred\x1b[0m\n", "red\n"),
        ("\r\x1b[2Kbar 1\r\x1b[2Ksaved\nbar 1\r\x1b[2Kbar 2\n", "saved\nbar 2\n"),
        ("unfinished", "unfinished\n"),
        ("\x1b]0;title\x07text\n", "text\n"),
    ],
)
@pytest.mark.parametrize("size", [1, 1000], ids=["byte by byte", "at once"])
def test_a_log_keeps_what_stays_on_a_terminal(written, kept, size):
    lines = PlainLines()
    data = written.encode()

    result = b"".join(lines.feed(data[at : at + size]) for at in range(0, len(data), size)) + lines.close()

    assert result.decode() == kept


def test_a_bar_that_never_ends_its_line_takes_no_memory():
    lines = PlainLines()

    assert [lines.feed(b"x" * 1000 + b"\r") for _ in range(100)] == [b""] * 100
    assert len(lines.close()) == 1001
    assert lines.feed(b"x" * 70_000) == b"x" * 70_000 + b"\n"


def test_the_launcher_never_imports_torch():
    code = "import sys, holdfast.launch.local; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True)
