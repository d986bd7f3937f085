"""The page that every run ends with, two runs compared, and a run watched in a terminal of three widths."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from holdfast.features.report.reading import RunReader
from holdfast.features.report.watch import screen
from holdfast.training.run_state import RunState
from tests.cli.commands import LiveRun
from tests.cli.fixtures import HOLDFAST, write_run
from tests.cli.in_process import cli_in_process
from tests.cli.screens import numbers, page_of
from tests.cli.warm import WarmPython, run
from tests.features.report.cases import RunFolder, data_of, killed_run, long_run
from tests.features.trackers.test_secrets import SECRETS, planted
from tests.messages import Said, lacks

COMMAND = ("-m", "holdfast.cli.main", "sft", "run.yaml")


@pytest.mark.slow
def test_a_run_ends_with_its_page_and_a_run_that_had_nothing_to_do_leaves_it(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    write_run(tmp_path / "run.yaml", tree)
    page = tmp_path / "runs/run/report.html"

    first = warm.run(*COMMAND, cwd=tmp_path)
    written = page.stat().st_mtime_ns
    second = warm.run(*COMMAND, cwd=tmp_path)

    assert (first.code, second.code) == (0, 0), first.err
    assert page_of(first.out) == "runs/run/report.html"
    assert "report.html" not in second.out
    assert page.stat().st_mtime_ns == written
    (drawn,) = data_of(page.read_text())["runs"]
    assert len(drawn["curves"]["loss"][1]) == 2


def test_a_refused_run_and_a_dry_run_write_no_page(warm: WarmPython, tmp_path: Path, tree: dict[str, Any]) -> None:
    write_run(tmp_path / "run.yaml", tree)

    refused = warm.run(*COMMAND, "data.max_length=1", cwd=tmp_path)
    dry = warm.run(*COMMAND, "dry_run=true", cwd=tmp_path)

    assert (refused.code, dry.code) == (2, 0), dry.err
    assert "report.html" not in refused.out + dry.out
    assert list(tmp_path.rglob("report.html")) == []


def test_a_stopped_run_has_its_page_before_the_command_ends(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    write_run(tmp_path / "run.yaml", tree | {"steps": 100_000})
    live = LiveRun(tmp_path, warm=warm)
    try:
        live.wait_for_step(3)
        live.terminate()
        done, _ = live.end()
    finally:
        live.close()

    assert done.code == 3, done.err
    (drawn,) = data_of((live.directory / "report.html").read_text())["runs"]
    ((_, words),) = drawn["marks"]["stopped"]
    assert lacks(words, "stopped: SIGTERM") == []


@pytest.mark.slow
def test_a_killed_rank_stands_on_the_page(warm: WarmPython, tmp_path: Path, tree: dict[str, Any]) -> None:
    write_run(tmp_path / "run.yaml", tree | {"steps": 100_000})
    live = LiveRun(tmp_path, warm=warm)
    try:
        live.wait_for_step(3)
        os.kill(live.rank(1), signal.SIGKILL)
        done, _ = live.end()
    finally:
        live.close()

    assert done.code == 3
    (drawn,) = data_of((live.directory / "report.html").read_text())["runs"]
    ((_, words),) = drawn["marks"]["failed"]
    assert words.startswith("Rank 1 ")
    assert "SIGKILL" in words


@pytest.mark.slow
def test_a_page_that_takes_too_long_is_left_out_and_the_exit_code_stays(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; import holdfast.patience as p; from dataclasses import replace\n"
        "from holdfast.features.report.run_page import write_at_end\n"
        "p.current = replace(p.current, page_after_stop_seconds=0.2)\n"
        "began = time.monotonic(); write_at_end(Path(sys.argv[1]), -1, stopped=True)\n"
        "print(round(time.monotonic() - began, 1))\n"
    )
    place = long_run(tmp_path, steps=30_000, samples=0).place

    done = run([HOLDFAST.with_name("python"), "-c", script, place], cwd=tmp_path)

    assert done.code == 0
    assert lacks(done.err, "0.2 s: `holdfast report") == []
    assert float(done.out) < 2
    assert not (place / "report.html").exists()
    assert [path.name for path in place.iterdir() if path.name.startswith(".")] == []


def test_two_runs_are_compared_at_equal_steps(tmp_path: Path, said: Said) -> None:
    one, two = RunFolder(tmp_path, "one"), RunFolder(tmp_path, "two", optim={"lr": 0.5})
    one.steps(1, 20)
    two.steps(1, 12)
    two.steps(13, 15, loss=0.5, grad_norm=1.0)

    done = cli_in_process("runs", "compare", one.place, two.place, cwd=tmp_path)

    assert done.code == 0, done.err
    lines = [line.strip() for line in done.out.splitlines()]
    assert any(re.fullmatch(r"optim\.lr +0\.001 +0\.5", line) for line in lines)
    assert [line.split()[1:] for line in lines if line.startswith("loss ")] == [
        ["1", "1", "1", "same"],
        ["5", "0.2", "0.2", "same"],
        ["8", "0.125", "0.125", "same"],
        ["11", "0.09091", "0.09091", "same"],
        ["15", "0.06667", "0.5", "0.4333"],
    ]
    assert any(re.fullmatch(r"grad_norm +— +— +there +—", line) for line in lines)
    assert numbers(lines[-1]) == [13, 1 / 13, 0.5]
    said(done.out)


def test_equal_runs_are_said_to_be(tmp_path: Path, said: Said) -> None:
    one, two = killed_run(tmp_path / "a", "run"), killed_run(tmp_path / "b", "run")

    done = cli_in_process("runs", "compare", one.place, two.place, cwd=tmp_path)

    last = done.out.splitlines()[-1]
    assert "step 60" in last
    said(last)


def test_no_planted_secret_is_on_the_page_or_in_a_comparison(tmp_path: Path) -> None:
    one = RunFolder(tmp_path, "one", **planted())
    two = RunFolder(tmp_path, "two")
    for folder in (one, two):
        folder.steps(1, 5)
    one.event("failed", 5, reason=f"OSError: https://user:{SECRETS[3]}@host/v1?token={SECRETS[4]}", time=1.0)
    one.event("health", 5, alarm="x", text=f"HF_TOKEN={SECRETS[5]} is wrong")
    variables = os.environ | {f"MY_TOKEN_{number}": secret for number, secret in enumerate(SECRETS[:10])}

    page = subprocess.run(
        [HOLDFAST, "report", one.place, two.place, "-o", tmp_path / "x.html"], env=variables, check=True
    )
    compared = subprocess.run(
        [HOLDFAST, "runs", "compare", one.place, two.place], env=variables, check=True, capture_output=True, text=True
    )

    assert page.returncode == 0
    text = (tmp_path / "x.html").read_text() + compared.stdout
    assert len(SECRETS) == 30
    assert [secret for secret in SECRETS if secret in text] == []


class Terminal:
    """`holdfast watch` in a pseudo-terminal."""

    def __init__(self, run: Path, columns: int) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 60, columns, 0, 0))
        variables = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}}
        self.process = subprocess.Popen(
            [HOLDFAST, "watch", run],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=variables | {"TERM": "xterm-256color"},
        )
        os.close(slave)
        self.text = ""

    def read(self, seconds: float) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self._master, 1 << 16).decode(errors="replace")
                except OSError:  # it has ended
                    return self.text
            elif self.process.poll() is not None:
                return self.text
        return self.text

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(10)
        finally:
            os.close(self._master)


def frames(text: str) -> list[list[str]]:
    """Return the lines of each frame, without colours and moves."""
    parts = re.split(r"(?:\r?\x1b\[2K(?:\x1b\[1A)?)+", text)
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part).replace("\r", "").splitlines() for part in parts]


@pytest.mark.parametrize("columns", [60, 110, 200])
def test_a_finished_run_is_watched_in_one_frame_that_fits(tmp_path: Path, columns: int) -> None:
    run = killed_run(tmp_path)
    before = sorted((path, path.stat().st_mtime_ns) for path in run.place.rglob("*"))
    terminal = Terminal(run.place, columns)
    try:
        text = terminal.read(60)
        code = terminal.process.wait(10)
    finally:
        terminal.close()

    lines = [line for frame in frames(text) for line in frame]
    assert code == 0
    assert max(map(cell_len, lines)) <= columns
    whole = "\n".join(lines)
    for words in (
        "run  grpo  done",
        "step 60 of 60",
        "Reward",
        "phases",
        "forward_backward",
        "step 60  1 MiB",
        "verified",
    ):
        assert words in whole
    assert re.search(r"step 50 resumed: .*step 50", whole)
    assert re.search(r"completions .*step 60", whole)
    assert "\x1b[2J" not in whole
    assert sorted((path, path.stat().st_mtime_ns) for path in run.place.rglob("*")) == before


@pytest.mark.slow
def test_a_run_that_goes_on_is_watched_to_its_end(warm: WarmPython, tmp_path: Path, tree: dict[str, Any]) -> None:
    write_run(tmp_path / "run.yaml", tree | {"steps": 100_000})
    live = LiveRun(tmp_path, warm=warm)
    terminal = None
    try:
        live.wait_for_step(5)
        terminal = Terminal(live.directory, 100)
        terminal.read(9)
        live.terminate()
        live.end()
        text = terminal.read(30)
        code = terminal.process.wait(20)
    finally:
        live.close()
        if terminal is not None:
            terminal.close()

    steps = [int(match.replace(",", "")) for match in re.findall(r"step ([\d,]+) of 100,000", text)]
    assert code == 0
    assert steps == sorted(steps)
    assert steps[-1] > steps[0]
    assert "running" in text
    assert "rank 1  step" in text
    assert "left" in text
    assert re.search(r"stopped: .*SIGTERM", text)


def test_without_a_terminal_one_frame_is_printed_and_no_run_is_refused(tmp_path: Path, said: Said) -> None:
    folder = killed_run(tmp_path)

    done = cli_in_process("watch", folder.place, cwd=tmp_path)
    refused = cli_in_process("watch", tmp_path / "absent", cwd=tmp_path)
    bad = cli_in_process("runs", "compare", folder.place, tmp_path, cwd=tmp_path)

    assert done.code == 0
    assert "\x1b" not in done.out
    assert "step 60 of 60" in done.out
    assert (refused.code, bad.code) == (2, 2)
    assert "absent" in refused.err
    said(refused.err.strip())
    said(bad.err.strip())
    assert json.dumps(bad.err).count("\\n") == 1


def test_a_running_run_by_epochs_has_a_bar_its_steps_and_the_time_left(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, steps=None, epochs=2)
    folder.start(0)
    for step in range(1, 31):
        waited = {"timing/save_wait": 8.0} if step == 20 else {}
        evaluated = {"timing/evaluation": 3.0} if step % 15 == 0 else {}
        folder.steps(step, step, epoch=step / 20, **waited, **evaluated)
    look = RunReader(folder.place, follows=True).update()
    look.state = RunState("running", "")
    console = Console(width=100, file=io.StringIO(), legacy_windows=False)

    console.print(screen(look, console))

    text = console.file.getvalue()
    assert "step 30 of 40  ━━━" in text
    assert re.search(r"  [\d.]+ s left", text)
    assert re.search(r"evaluation\b.* 3,000\.0 ms", text)
    assert re.search(r"save_wait\b.* 8,000\.0 ms", text)
    assert re.search(r"backward +200\.0 ms", text)
