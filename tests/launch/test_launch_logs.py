"""Logs: hidden until the run directory exists, appended to on every start, plain lines even from a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import rich

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


def run_in_a_terminal(ground, script, **environ):
    """Return what a terminal of 91 columns receives, and the exit code."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 91, 0, 0))
    launcher = subprocess.Popen(
        ground.driver(script, ranks=1), env={**ground.environ, **environ}, stdout=slave, stderr=slave
    )
    os.close(slave)
    shown = b""
    try:
        while chunk := os.read(master, 65536):
            shown += chunk
    except OSError:
        pass
    os.close(master)
    return shown.decode(), launcher.wait(timeout=20)


def test_rank_0_sees_a_terminal_of_the_users_size_when_there_is_one(ground):
    script = "make_run()\nprint(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size(1).columns)"

    shown, code = run_in_a_terminal(ground, script)

    assert (shown, code) == ("True True 91\r\n", 0)


def test_a_rich_progress_bar_is_live_on_the_terminal_and_plain_in_the_log(ground):
    site = str(Path(rich.__file__).parents[1])
    script = f"""
        sys.path.insert(0, {site!r})
        make_run()
        from rich.progress import Progress
        with Progress(refresh_per_second=50) as progress:
            first, second = progress.add_task("first", total=9), progress.add_task("second", total=9)
            for number in range(9):
                progress.console.print("saved", number)
                progress.advance(first), progress.advance(second)
                time.sleep(0.03)
    """

    shown, code = run_in_a_terminal(ground, script, TERM="xterm")

    log = (ground.run / "logs" / "rank-0.log").read_text()
    assert code == 0
    assert "\x1b[2K" in shown
    assert "\x1b" not in log
    assert re.findall("saved (.)", log) == list("012345678")
    assert log.count("first") <= 2
    assert re.search(r"first .*100%.*\nsecond .*100%", log)


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
        ("a\nb\n\x1b[1A\x1b[2Kc\n", "a\nc\n"),
        ("top\n\x1b[2K\r1\n2\n\x1b[2A\r\x1b[2Kone\n\x1b[2Ktwo\n", "top\none\ntwo\n"),
        ("unfinished", "unfinished\n"),
        ("\x1b]0;title\x07text\n", "text\n"),
    ],
)
@pytest.mark.parametrize("size", [1, 1000], ids=["byte by byte", "at once"])
def test_a_log_keeps_what_stays_on_a_terminal(written, kept, size):
    lines = PlainLines()
    data = written.encode()
    # The first move up shows how far a display reaches; before it nothing is held back, so teach it here.
    lines.feed(b"\x1b[2A")

    result = b"".join(lines.feed(data[at : at + size]) for at in range(0, len(data), size)) + lines.close()

    assert result.decode() == kept


def test_the_launcher_never_imports_torch():
    code = "import sys, holdfast.launch.local; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True)
